"""Tree speculative decoding with draft heads and draft models for Hugging Face LLMs.

`specdec.generate(model, drafter, input_ids, ...)` takes the place of `model.generate`. Names are loaded on first use
(PEP 562), so that `import specdec` is fast and `import specdec.kernels` needs torch and triton alone.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from specdec.acceptance import AcceptanceStats, Greedy, Naive, Rejection, Traversal, Typical
    from specdec.checking import CheckReport, check
    from specdec.checkpoints import load_drafter
    from specdec.custom_generate import hf_generate
    from specdec.decoder import Decoder, DecodeResult
    from specdec.draft_tree import DraftTree
    from specdec.drafters.base import Drafter
    from specdec.generation import SpecDecodeOutput, generate
    from specdec.kernels.verdict import Verdict
    from specdec.models.target import Target
    from specdec.tiny import load_tiny
    from specdec.trees import TreeShape, as_tree_shape, preset_names

_HOMES = {
    "AcceptanceStats": "specdec.acceptance",
    "CheckReport": "specdec.checking",
    "DecodeResult": "specdec.decoder",
    "Decoder": "specdec.decoder",
    "DraftTree": "specdec.draft_tree",
    "Drafter": "specdec.drafters.base",
    "Greedy": "specdec.acceptance",
    "Naive": "specdec.acceptance",
    "Rejection": "specdec.acceptance",
    "SpecDecodeOutput": "specdec.generation",
    "Target": "specdec.models.target",
    "Traversal": "specdec.acceptance",
    "TreeShape": "specdec.trees",
    "Typical": "specdec.acceptance",
    "Verdict": "specdec.kernels.verdict",
    "as_tree_shape": "specdec.trees",
    "check": "specdec.checking",
    "generate": "specdec.generation",
    "hf_generate": "specdec.custom_generate",
    "load_drafter": "specdec.checkpoints",
    "load_tiny": "specdec.tiny",
    "preset_names": "specdec.trees",
}

__all__ = [
    "AcceptanceStats",
    "CheckReport",
    "DecodeResult",
    "Decoder",
    "DraftTree",
    "Drafter",
    "Greedy",
    "Naive",
    "Rejection",
    "SpecDecodeOutput",
    "Target",
    "Traversal",
    "TreeShape",
    "Typical",
    "Verdict",
    "as_tree_shape",
    "check",
    "generate",
    "hf_generate",
    "load_drafter",
    "load_tiny",
    "preset_names",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specdec' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
