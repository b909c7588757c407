"""A run whose every text wants to be more than text."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from synthetic import group, write_run, write_step

from rloo_cli.run.folder import RunFolder

MARK = "alert(1)"
TEXTS = [
    f"</script><script>{MARK}</script>",
    f"<img src=x onerror={MARK}>",
    f"<!-- <script>{MARK}",
    "{{ 7 * 7 }} {% raw %} ${7*7} $\\frac$",
    "\x1b[2J\x00\x9b31m\r\n\tgone\u202eevil\u2066\ufeff",
    f"<svg/onload={MARK}>&lt;&#x202e;",
    f'"><script src="https://example.invalid/x.js">{MARK}',
    "]]>' onclick='" + MARK,
]
NAME = "</script><b>run"


def write_hostile_run(folder: Path) -> Path:
    """Completions, prompts, names of functions, recipe and environment are all hostile."""
    hostile = "".join(TEXTS)
    folder = write_run(
        folder / NAME.replace("/", "∕"), changed={f"custom/{TEXTS[1]}": lambda t: t, f"rewards/{TEXTS[0]}/mean": lambda t: t}
    )
    rows = []
    for i, text in enumerate(TEXTS):
        rows += group(i, [1.0, 0.0], completion=text, prompt_text=hostile, by_function={TEXTS[0]: 1.0, TEXTS[4]: None})
    write_step(folder, 3, rows)
    run = RunFolder(folder)
    recipe = yaml.safe_load(run.recipe.read_text())
    recipe["model"]["model_name_or_path"] = TEXTS[0] + TEXTS[3]
    recipe["rewards"][0]["kwargs"] = {TEXTS[1]: TEXTS[6]}
    run.recipe.write_text(yaml.safe_dump(recipe))
    environment = json.loads(run.environment.read_text())
    environment |= {
        "host": TEXTS[0],
        "command": TEXTS,
        "packages": {TEXTS[1]: TEXTS[4]},
        "git": {"commit": TEXTS[7]},
        "gpus": TEXTS,
        "cpu": TEXTS[5],
    }
    run.environment.write_text(json.dumps(environment))
    attempt = run.attempt(1)
    attempt.mkdir(parents=True)
    (attempt / "rank-0.json").write_text(json.dumps({"rank": 0, "exit_code": 1, "reason": TEXTS[0] + TEXTS[4]}))
    return folder
