"""Two processes that share a target decode what one process decodes."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from lib.families import FAMILIES
from lib.tensor_parallel_worker import DRAFTERS, PROMPTS, decode
from specdec.drafters.eagle import Eagle
from specdec.drafters.medusa import Medusa
from specdec.models.networks.eagle import EagleConfig, EagleNetwork
from specdec.models.networks.medusa import MedusaConfig, MedusaHeads
from specdec.models.target.sharding import Sharding
from specdec.models.target.target import Target
from specdec.trees.shape import TreeShape

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 240  # of a busy machine; alone it takes about ten seconds

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("PyTorch was built without gloo", allow_module_level=True)
if importlib.util.find_spec("accelerate") is None:
    pytest.skip("transformers needs accelerate to shard a model", allow_module_level=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target with two KV heads, one per process, and random drafters."""
    folder = tmp_path_factory.mktemp("sharded")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = FAMILIES["llama"]().eval()
        model.save_pretrained(folder / "target")
        target = Target(model)
        draft = LlamaConfig(**{**model.config.to_dict(), "hidden_size": 32, "num_hidden_layers": 1, "head_dim": 8})
        LlamaForCausalLM(draft).save_pretrained(folder / "draft_model")
        heads = MedusaHeads(MedusaConfig(hidden_size=64, vocab_size=None, num_heads=2))  # these share the LM head
        eagle = EagleNetwork(EagleConfig.for_target(model.config))
        for network in (heads, eagle):
            for parameter in network.parameters():
                torch.nn.init.normal_(parameter, std=0.1)
        tree = TreeShape.from_k_config((3, 2))
        for name, drafter in (("medusa", Medusa(heads, tree)), ("eagle", Eagle(eagle, tree))):
            drafter.bind(target)
            drafter.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def together(folder):
    """What each of two processes found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    outputs = [folder / f"{rank}.json" for rank in range(2)]
    processes = []
    for rank, output in enumerate(outputs):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**os.environ, **{name: str(value) for name, value in place.items()}, "CUDA_VISIBLE_DEVICES": ""}
        environment["OMP_NUM_THREADS"] = "1"
        command = [sys.executable, "-m", "lib.tensor_parallel_worker", str(folder), str(output)]
        processes.append(
            subprocess.Popen(
                command, cwd=ROOT / "tests", env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        )
    try:
        logs = [process.communicate(timeout=TIMEOUT_S)[0].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], logs[0][-3000:] + logs[1][-3000:]
    return [json.loads(output.read_text()) for output in outputs]


@pytest.fixture(scope="module")
def alone(folder):
    return decode(Target(LlamaForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()), folder)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_texts_are_those_of_one_process(drafter, together, alone):
    for found in together:
        assert found[f"greedy {drafter}"] == alone[f"greedy {drafter}"] == alone["greedy none"]
    assert [len(row) for row in alone["greedy none"]] == [14] * len(PROMPTS)


@pytest.mark.parametrize("case", ["sampled medusa", "sampled draft_model", "no seed"])
def test_all_processes_sample_the_same_text(case, together, alone):
    assert together[0][case] == together[1][case]
    assert together[0][case] != alone["greedy none"]


def test_the_first_process_decides_what_is_drafted(together, alone):
    """The second one drafts no right token: without agreement its cache would hold other tokens."""
    for found in together:
        assert found["other drafts"] == alone["greedy none"]
        assert {count for row in found["accepted"] for count in row[:-1]} == {3}


def test_a_process_caches_its_own_heads(together):
    for found in together:
        assert found["cache"] == [3, 2, 2, 7, 1, 8]  # one of the two KV heads
        assert found["ranks"] == 2


def test_a_whole_model_is_not_sharded(folder):
    model = LlamaForCausalLM.from_pretrained(folder / "target")
    target = Target(model)
    assert target.sharding is None
    assert Sharding.of(model, model.model.layers, 8) is None
    value = torch.ones(2)
    assert target.broadcast_from_first(value) is value
