"""One of the processes of test_tensor_parallel.py: decodes with a sharded target and writes what it saw.

Arguments: folder with the target and the drafters, and the file to write.
"""

import json
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import specdec
from lib.scripted_drafters import always_wrong, oracle
from specdec.loop.decoder import Decoder
from specdec.loop.rules import Naive, Rejection
from specdec.models.target.target import Target
from specdec.trees.shape import TreeShape

PROMPTS = [[5, 17, 3, 40, 22], [61, 9, 33]]
NEW_TOKENS = 14
DRAFTERS = ("none", "medusa", "draft_model", "eagle")


def decode(target, folder, names=DRAFTERS):
    """Greedy and sampled texts by case."""
    prompts = [torch.tensor(prompt) for prompt in PROMPTS]

    def drafter(name):
        return specdec.load_drafter(name if name == "none" else folder / name, target)

    def run(name, rule=None, seed=None):
        return Decoder(target, drafter(name), acceptance=rule).decode(prompts, NEW_TOKENS, seed=seed).tokens

    found = {f"greedy {name}": run(name) for name in names}
    found["sampled medusa"] = run("medusa", Naive(), seed=3)
    found["sampled draft_model"] = run("draft_model", Rejection(), seed=3)
    return found


def main(folder, output):
    """Decode, then again with what a process of another mind would bring along."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    model = AutoModelForCausalLM.from_pretrained(folder / "target", tp_plan="auto", dtype=torch.float32).eval()
    target = Target(model)
    found = decode(target, folder)
    found["cache"] = list(target.new_cache(2, 7).data.shape)
    found["ranks"] = target.sharding.num_ranks

    prompts = [torch.tensor(prompt) for prompt in PROMPTS]
    # the first process knows the text, the second one never drafts a right token
    scripted = (oracle, always_wrong)[rank](TreeShape.from_k_config((2, 2)), found["greedy none"], target.vocab_size)
    result = Decoder(target, scripted).decode(prompts, NEW_TOKENS)
    found["other drafts"], found["accepted"] = result.tokens, result.stats.num_emitted
    torch.manual_seed(rank)
    found["no seed"] = Decoder(target, acceptance=Naive()).decode(prompts, NEW_TOKENS).tokens
    output.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
