"""Makes docs/pictures/trace.png anew: a trace of the bundled model, as the report shows it, from a real run.

PYTHONPATH=tests .venv/bin/python -m lib.trace_picture docs/pictures/trace.png
"""

import sys
import tempfile
from pathlib import Path

from lib.browser import launched, opened
from specdec.bundled.load import load_tiny
from specdec.drafters.load import load_drafter
from specdec.evaluation.prompts import Question
from specdec.evaluation.report import write_report
from specdec.evaluation.run import Plan, evaluate
from specdec.models.target.target import Target

PROMPT = '''class Stack:
    """A last-in, first-out stack."""

    def __init__(self):
'''
STEP = 3  # whose tree is unfolded
WIDTH = 760
BETWEEN = """([first, last]) => [document.querySelector(first).getBoundingClientRect().top + scrollY,
  document.querySelector(last).getBoundingClientRect().bottom + scrollY]"""


def main(place):
    """Decode, write the report, and take its picture."""
    model, tokenizer = load_tiny()
    target = Target(model)
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(max_new_tokens=48, with_transformers=False)
        drafters = {"eagle": load_drafter("tiny/eagle", target)}
        results, _ = evaluate(target, drafters, [Question("stack", "", (PROMPT,))], tokenizer, folder, plan)
        write_report(results, folder)
        with (
            launched() as browser,
            opened(browser, Path(folder) / "report.html", width=WIDTH, scale=1.5) as (page, _, _),
        ):
            page.get_by_role("button", name=f"Step {STEP}").click()
            page.evaluate("document.activeElement.blur()")
            top, bottom = page.evaluate(BETWEEN, ["#trace-summary", f"#step-{STEP - 1}"])
            clip = {"x": 8, "y": top - 12, "width": WIDTH - 16, "height": bottom - top + 12}
            page.screenshot(path=place, clip=clip, full_page=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
