#!/bin/sh
# Creates the virtual environment $1 with the first Python 3.11 or newer that is found ($PYTHON first), or says what is missing.
set -eu
venv=$1
if [ -x "$venv/bin/python" ] && "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    exit 0
fi
for candidate in "${PYTHON:-python3}" python3.11 python3.12 python3.13 python3; do
    command -v "$candidate" >/dev/null 2>&1 || continue
    "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
    if "$candidate" -m venv "$venv"; then
        exit 0
    fi
    echo "error: $candidate could not create $venv (on Debian and Ubuntu: apt install python3-venv)" >&2
    exit 1
done
echo "error: Python 3.11 or newer was not found. Install one, or name it: make PYTHON=/path/to/python3.12" >&2
exit 1
