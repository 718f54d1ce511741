"""The SGLang backend: the contract's `RunnerEagle3TargetModel` with SGLang behind it."""

from collections.abc import Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from fledge.target.batch import Supervision
from fledge.target.packing import Documents, Group
from fledge.target.runner import RunnerEagle3TargetModel
from fledge.target.sglang_runner import SGLangTargetRunner


class SGLangEagle3TargetModel(RunnerEagle3TargetModel):
    """A target that SGLang runs in this process; `fledge serve-target` gives it one of its own."""

    @classmethod
    def from_pretrained(
        cls,
        model: str | PathLike[str],
        *,
        aux_layer_ids: Sequence[int] | None = None,
        dtype: torch.dtype | str | None = None,
        supervision: Supervision = "hidden",
        trust_remote_code: bool = False,
        **sglang_kwargs: Any,
    ) -> "SGLangEagle3TargetModel":
        """Load a model by name into SGLang; `sglang_kwargs` as in `SGLangTargetRunner.build`."""
        from fledge.models.resolve import local_model
        from fledge.target.loading import tokenizer_in

        runner = SGLangTargetRunner.build(
            model, dtype=dtype, trust_remote_code=trust_remote_code, **sglang_kwargs
        )
        try:
            tokenizer = tokenizer_in(local_model(str(model)), trust_remote_code=trust_remote_code)
            return cls(runner, aux_layer_ids, supervision=supervision, tokenizer=tokenizer)
        except BaseException:
            runner.close()
            raise

    def _groups(self, documents: Documents, ids_BT: Tensor) -> Sequence[Group]:
        """All documents end to end in one row: SGLang needs no padding to keep them apart."""
        if not documents.lengths:
            return []
        lengths = torch.tensor(documents.lengths)
        slots_N = torch.cat(
            [
                torch.arange(begin, begin + length)
                for begin, length in zip(documents.starts, documents.lengths, strict=True)
            ]
        ).to(ids_BT.device)
        numbers_N = torch.repeat_interleave(torch.arange(1, len(lengths) + 1), lengths)
        cells_N = torch.arange(len(slots_N), device=ids_BT.device)
        return [Group(slots_N[None], numbers_N[None], cells=cells_N, slots=slots_N)]
