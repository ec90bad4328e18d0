"""What there is to draft with for a target when nobody names a drafter: what needs no weights, what was made for it.

Looks at what is on this machine alone: bundled drafters, and published ones that were downloaded before.
"""

from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from specdec.bundled.load import NAMED_MODELS, bundled_drafter, bundled_drafters
from specdec.drafting.folder import RECORD, DrafterRecord, TargetRecord
from specdec.models.target.target import Target

__all__ = ["PUBLISHED", "drafters_at_hand"]

FREE = "suffix"
"""What looks the text up in itself, and costs a search."""

PREFERRED = ("eagle3", "eagle", "hydra++", "medusa")
"""Of the bundled drafters for one target, the first of these that there is."""

PUBLISHED = {
    "lmsys/vicuna-7b-v1.3": "yuhuili/EAGLE-Vicuna-7B-v1.3",
    "lmsys/vicuna-13b-v1.3": "yuhuili/EAGLE-Vicuna-13B-v1.3",
    "lmsys/vicuna-33b-v1.3": "yuhuili/EAGLE-Vicuna-33B-v1.3",
    "meta-llama/Llama-2-7b-chat-hf": "yuhuili/EAGLE-llama2-chat-7B",
    "meta-llama/Llama-2-13b-chat-hf": "yuhuili/EAGLE-llama2-chat-13B",
    "meta-llama/Llama-2-70b-chat-hf": "yuhuili/EAGLE-llama2-chat-70B",
    "meta-llama/Meta-Llama-3-8B-Instruct": "yuhuili/EAGLE-LLaMA3-Instruct-8B",
    "meta-llama/Meta-Llama-3-70B-Instruct": "yuhuili/EAGLE-LLaMA3-Instruct-70B",
    "meta-llama/Llama-3.1-8B-Instruct": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
    "meta-llama/Llama-3.3-70B-Instruct": "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B",
}
"""Drafters that their authors published, by the hub id of the target; used once they have been downloaded."""


def drafters_at_hand(target: Target) -> tuple[str, ...]:
    """Sources for `specdec.load_drafter`: one that needs no weights, and one that was made for this target, if any."""
    made = _bundled_for(target) or _published_for(target)
    return (FREE,) if made is None else (FREE, made)


def _bundled_for(target: Target) -> str | None:
    """A bundled drafter of a target with the same sizes and embedding."""
    here = TargetRecord.of(target)
    for model in NAMED_MODELS:
        names = bundled_drafters(model)
        for name in sorted(names, key=lambda one: PREFERRED.index(one) if one in PREFERRED else len(PREFERRED)):
            file = Path(bundled_drafter(model, name)) / RECORD
            if file.exists():
                try:
                    DrafterRecord.read(file).target.check(here, source=name, any_target=False)
                except ValueError:
                    break  # all of a model's drafters have one target
                return f"{model}/{name}"
    return None


def _published_for(target: Target) -> str | None:
    """A published drafter that was downloaded before."""
    name = str(getattr(target.model, "name_or_path", "") or "")
    drafter = PUBLISHED.get(name)
    if drafter is None or not isinstance(try_to_load_from_cache(drafter, "config.json"), str):
        return None
    return drafter
