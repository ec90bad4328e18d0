"""A thousand bad requests for a server that answers others meanwhile: `python -m lib.fuzz_server 1000` in `tests`."""

import concurrent.futures
import json
import sys

import specdec
from lib.serving import fuzz, post, serving

NAMES = [f"{name} and the {thing}" for name in ("Tom", "Lily", "Sam") for thing in ("dog", "cat", "ball", "sea")]


def main(count):
    """Print what came, and fail if any of it should not have come."""
    model, tokenizer = specdec.load_tiny()
    with specdec.Engine(model, "tiny/medusa", tokenizer=tokenizer, max_rows=4, max_length=512) as engine:
        with serving(engine) as address, concurrent.futures.ThreadPoolExecutor(4) as threads:
            bad = [threads.submit(fuzz, address, first, count // 3) for first in (0, count, 2 * count)]
            wrong_texts = num_texts = 0
            while not all(one.done() for one in bad):
                for name in NAMES:
                    asked = {"model": "tiny", "prompt": name, "max_tokens": 24, "temperature": 0}
                    status, body, _ = post(address, "/v1/completions", asked)
                    num_texts += 1
                    wrong_texts += status != 200 or expected(model, tokenizer, name) not in body.decode()
            found = [one.result() for one in bad]
        stats = engine.stats()
    wrong = [one for part, _ in found for one in part]
    statuses = {}
    for _, part in found:
        for status, number in part.items():
            statuses[status] = statuses.get(status, 0) + number
    say = sys.stdout.write
    say(f"{count // 3 * 3} bad requests: statuses {statuses}, not as they should be: {wrong}\n")
    say(f"{num_texts} good ones meanwhile, {wrong_texts} of them with another text; {stats}\n")
    return 1 if wrong or wrong_texts else 0


def expected(model, tokenizer, prompt):
    """The text as it stands in an answer."""
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    if prompt not in KNOWN:
        KNOWN[prompt] = specdec.generate(model, None, ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
    text = tokenizer.decode(KNOWN[prompt], skip_special_tokens=True)
    return json.dumps(text, ensure_ascii=False)


KNOWN = {}

if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000))
