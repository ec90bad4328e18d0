"""Tree speculative decoding with draft heads and draft models for Hugging Face LLMs.

`specdec.generate(model, drafter, input_ids, ...)` takes the place of `model.generate`. Names are loaded on first use
(PEP 562), so that `import specdec` is fast and `import specdec.kernels` needs torch and triton alone.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from specdec.bundled.load import load_model, load_tiny
    from specdec.drafting.base import Drafter
    from specdec.drafting.draft_tree import DraftTree
    from specdec.engine.engine import Engine
    from specdec.evaluation.checking import CheckReport, check
    from specdec.generation.generate import SpecDecodeOutput, generate
    from specdec.generation.hf_generate import hf_generate
    from specdec.kernels.common.verdict import Verdict
    from specdec.loop.decoder import Decoder, DecodeResult
    from specdec.loop.rules import Greedy, Naive, Rejection, Traversal, Typical
    from specdec.loop.stats import AcceptanceStats
    from specdec.models.target.target import Target
    from specdec.trees.shape import TreeShape, as_tree_shape, preset_names
    from specdec.tuning.auto import load_drafter

__all__ = [
    "AcceptanceStats",
    "CheckReport",
    "DecodeResult",
    "Decoder",
    "DraftTree",
    "Drafter",
    "Engine",
    "Greedy",
    "Naive",
]
__all__ += ["Rejection", "SpecDecodeOutput", "Target", "Traversal", "TreeShape", "Typical", "Verdict", "as_tree_shape"]
__all__ += ["check", "generate", "hf_generate", "load_drafter", "load_model", "load_tiny", "preset_names"]

_NAMES = {
    "specdec.bundled.load": "load_model load_tiny",
    "specdec.drafting.base": "Drafter",
    "specdec.drafting.draft_tree": "DraftTree",
    "specdec.engine.engine": "Engine",
    "specdec.evaluation.checking": "CheckReport check",
    "specdec.generation.generate": "SpecDecodeOutput generate",
    "specdec.generation.hf_generate": "hf_generate",
    "specdec.kernels.common.verdict": "Verdict",
    "specdec.loop.decoder": "DecodeResult Decoder",
    "specdec.loop.rules": "Greedy Naive Rejection Traversal Typical",
    "specdec.loop.stats": "AcceptanceStats",
    "specdec.models.target.target": "Target",
    "specdec.trees.shape": "TreeShape as_tree_shape preset_names",
    "specdec.tuning.auto": "load_drafter",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specdec' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
