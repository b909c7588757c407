#!/bin/sh
# Installs what tests/slurm needs, where that can be done: Debian's packages, as root. Exit code 0 in any case; the tests tell what they lack.
PACKAGES="slurm-wlm slurmctld slurmd slurm-client munge iproute2"
if command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v munged >/dev/null && command -v ip >/dev/null; then
    echo "SLURM is installed"
elif [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "SLURM is not installed here (that takes root and apt-get): tests on a cluster are skipped"
else
    echo "installing SLURM: $PACKAGES"
    export DEBIAN_FRONTEND=noninteractive
    # shellcheck disable=SC2086
    { apt-get -qq update && apt-get -qq install -y --no-install-recommends $PACKAGES; } >/dev/null 2>&1 ||
        echo "apt-get could not install it: tests on a cluster are skipped"
fi
