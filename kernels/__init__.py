"""Triton kernels of tree speculative decoding. Tensors in, tensors out; torch and triton only.

Every op can be used on its own, without the runtime: `from specdec.kernels import tree_attention`. Importing this
package loads no kernel: each name is fetched on first use, so the eager references need no Triton.

The folder lies at the top of the repository, so with the repository root on `sys.path` it also answers to the bare
name `kernels`, which belongs to a Hugging Face package that transformers uses when it is installed. Under that name
this file steps aside for the real package.
"""

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.kernels.accept_greedy import accept_greedy
    from specdec.kernels.accept_naive import accept_naive
    from specdec.kernels.accept_rejection import accept_rejection
    from specdec.kernels.accept_traversal import accept_traversal
    from specdec.kernels.accept_typical import accept_typical
    from specdec.kernels.commit_pairs import commit_pairs
    from specdec.kernels.common.dynamic_tree import Beam, MergedTree, RerankedTree
    from specdec.kernels.common.launch import Backend, LaunchConfig
    from specdec.kernels.common.topk import TopK
    from specdec.kernels.common.verdict import Verdict
    from specdec.kernels.draft_heads import draft_heads, draft_heads_concat
    from specdec.kernels.emit_step import emit_step
    from specdec.kernels.kv_compact import kv_compact
    from specdec.kernels.learn_chances import learn_chances
    from specdec.kernels.lm_head_topk import lm_head_topk
    from specdec.kernels.lstm_recurrence import lstm_recurrence
    from specdec.kernels.philox_uniform import philox_exponential, philox_uniform
    from specdec.kernels.rms_norm import add_rms_norm, rms_norm
    from specdec.kernels.rope_kv_write import rope_kv_write
    from specdec.kernels.sample_probs import sample_probs, sample_race, warp_logits
    from specdec.kernels.skinny_linear import skinny_linear
    from specdec.kernels.swiglu import swiglu
    from specdec.kernels.tree_attention import tree_attention
    from specdec.kernels.tree_expand import tree_expand
    from specdec.kernels.tree_grow import tree_grow
    from specdec.kernels.tree_merge import tree_merge
    from specdec.kernels.tree_rerank import beam_step, tree_rerank

__all__ = ["Backend", "Beam", "LaunchConfig", "MergedTree", "RerankedTree", "TopK", "Verdict", "accept_greedy"]
__all__ += ["accept_naive", "accept_rejection", "accept_traversal", "accept_typical", "add_rms_norm", "beam_step"]
__all__ += ["commit_pairs", "draft_heads", "draft_heads_concat", "emit_step", "kv_compact", "learn_chances"]
__all__ += ["lm_head_topk", "lstm_recurrence", "philox_exponential", "philox_uniform", "rms_norm", "rope_kv_write"]
__all__ += ["sample_probs", "sample_race", "skinny_linear", "swiglu", "tree_attention", "tree_expand", "tree_grow"]
__all__ += ["tree_merge", "tree_rerank", "warp_logits"]

# Every other name lives in a module of its own name.
_MODULES = {
    "Backend": "common.launch",
    "Beam": "common.dynamic_tree",
    "LaunchConfig": "common.launch",
    "MergedTree": "common.dynamic_tree",
    "RerankedTree": "common.dynamic_tree",
    "TopK": "common.topk",
    "Verdict": "common.verdict",
    "add_rms_norm": "rms_norm",
    "beam_step": "tree_rerank",
    "draft_heads_concat": "draft_heads",
    "philox_exponential": "philox_uniform",
    "sample_race": "sample_probs",
    "warp_logits": "sample_probs",
}


class _KernelsPackage(ModuleType):
    """A package whose ops share their modules' names: the attribute is always the op, in any order of imports."""

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system binds each submodule it has loaded to its package, which would hide the op.
        if isinstance(value, ModuleType) and name in __all__:
            value = getattr(value, name)
        super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, name)}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _find_other_kernels() -> importlib.machinery.ModuleSpec | None:
    """Find the package that `import kernels` would give if this folder were not on `sys.path`."""
    root = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    path = [entry for entry in sys.path if os.path.realpath(entry or os.curdir) != root]
    for finder in sys.meta_path:
        spec = finder.find_spec("kernels", path)
        if spec is not None and spec.loader is not None and spec.origin is not None:
            return spec
    return None


def _hand_over() -> None:
    """Put the real package in this module's place."""
    spec = _find_other_kernels()
    if spec is None or spec.loader is None:
        # Not an ImportError: transformers has found the folder by now and only asks for the version. This one is
        # older than any that it accepts, so it does without; a missing one makes its import fail.
        globals()["__version__"] = "0"
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules[__name__] = module
    spec.loader.exec_module(module)


if __name__ == "kernels":
    _hand_over()
else:
    sys.modules[__name__].__class__ = _KernelsPackage
