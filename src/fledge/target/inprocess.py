"""Shared base of the backends that run the target in this process.

Moves rows to the device, runs padded rows as they are and packed rows document by document, and
derives probabilities if requested. A subclass implements the forward pass.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.errors import BadInput
from fledge.core.head import TargetHead
from fledge.core.rows import TokenBatch
from fledge.core.transfer import on_device
from fledge.target.base import Eagle3TargetBackend, TargetInfo, check_token_ids
from fledge.target.capture import AuxBuffer
from fledge.target.layers import inner_layers
from fledge.target.packing import Documents, Group, find_documents, group_documents, plan_groups
from fledge.target.rank_groups import RankGroups
from fledge.target.weights import tokenizer_fingerprint


class InProcessTarget(Eagle3TargetBackend):
    """A target whose forward is called directly."""

    overhead_tokens: int  # cost of one more forward pass, in tokens; see `packing`
    tokenizer: Any
    _depth: int  # number of decoder layers
    _info: TargetInfo | None = None
    _rank_groups: RankGroups | None = None  # the ranks that share the target with this one

    @abstractmethod
    def _forward(self, ids: Tensor, mask: Tensor, aux: AuxBuffer, group: Group | None) -> Tensor:
        """Run one pass over some rows: write aux states to `aux` and return the unshifted answer.

        The answer is logits or last hidden states. Without `group` the rows are those of the batch;
        with it, they are documents, padded on the right only, where a causal model cannot see the
        padding.
        """

    @abstractmethod
    def _answers_logits(self) -> bool:
        """Whether `_forward` returns logits rather than last hidden states."""

    @abstractmethod
    def _head_of_states(self) -> TargetHead:
        """The head that turns the returned states into logits."""

    @abstractmethod
    def _device(self) -> torch.device:
        """The device that token ids must be on."""

    @abstractmethod
    def _vocabulary_rows(self) -> int | None:
        """Number of rows of the input embedding; None when unknown."""

    @abstractmethod
    def _facts(self) -> dict[str, Any]:
        """The fields of `TargetInfo` that follow from neither the head nor the tokenizer."""

    def info(self) -> TargetInfo:
        self._check_open()
        if self._info is None:
            head, has_tokenizer = self._head_of_states(), self.tokenizer is not None
            self._info = TargetInfo(
                head=head,
                hidden_size=head.weight_VD.shape[1],
                vocab_size=head.weight_VD.shape[0],
                depth=self._depth,
                tokenizer_fingerprint=(
                    tokenizer_fingerprint(self.tokenizer) if has_tokenizer else None
                ),
                **self._facts(),
            )
        return self._info

    @torch.no_grad()
    def answer(self, rows: TokenBatch) -> Eagle3TargetBatch:
        """Run the target and capture aux hidden states plus supervision.

        Documents of packed rows never attend to each other (see `packing`); padded rows run as they
        are, under their attention mask. Ranks that share the target run each other's rows too.
        """
        self._check_open()
        documents = find_documents(rows)
        if documents is not None and not documents.lengths:
            raise ValueError("attention_mask marks no token at all")
        size = self._vocabulary_rows()
        if size is not None and rows.input_ids.device.type == "cpu":  # avoid a synchronization
            check_token_ids(rows.input_ids, size)
        device = self._device()
        mapping = self._vocab_mapping(device) if self.supervision == "probs" else None
        with on_device(device):
            if self._rank_groups is None:
                device_rows = rows.to(device)
                batch = self._run_rows(device_rows, self._passes(device_rows, documents))
            else:
                shared_batch = self._run_with_ranks(rows, self._rank_groups)
                assert shared_batch is not None
                batch = shared_batch
            if mapping is not None:
                head = None if self._answers_logits() else self._head_of_states()
                batch = batch.with_probs(head, *mapping)
            return batch

    @torch.no_grad()
    def join(self) -> None:
        self._check_open()
        if self._rank_groups is not None:
            with on_device(self._device()):
                self._run_with_ranks(None, self._rank_groups)

    def _run_with_ranks(
        self, rows: TokenBatch | None, ranks: RankGroups
    ) -> Eagle3TargetBatch | None:
        """Run the rows of every rank, in the same order on all ranks; only the answer about this
        rank's own rows is kept."""
        device = self._device()
        questions, own_index = ranks.exchange(rows)
        device_rows = [question.to(device) for question in questions]
        passes = [
            self._passes(moved, find_documents(question))
            for question, moved in zip(questions, device_rows, strict=True)
        ]
        count = sum(map(len, passes))
        idle = ranks.most(count) - count
        own_batch = None
        for index, question in enumerate(device_rows):
            batch = self._run_rows(question, passes[index])
            own_batch = batch if index == own_index else own_batch
        dummy_11 = torch.zeros((1, 1), dtype=torch.long, device=device)
        for _ in range(idle):
            aux = AuxBuffer(dummy_11.shape, self.aux_layer_ids)
            self._forward(dummy_11, torch.ones_like(dummy_11), aux, None)
        return own_batch

    def _passes(self, rows: TokenBatch, documents: Documents | None) -> Sequence[Group | None]:
        """The forward passes that rows take: one (None) for padded rows, else one per group of
        documents."""
        return [None] if documents is None else self._groups(documents, rows.input_ids)

    def _run_rows(self, rows: TokenBatch, passes: Sequence[Group | None]) -> Eagle3TargetBatch:
        aux = AuxBuffer(rows.input_ids.shape, self.aux_layer_ids)
        answer_BTX: Tensor | None = None
        for group in passes:
            if group is None:
                ids_NL, mask_NL = rows.input_ids, rows.attention_mask
            else:
                ids_NL, mask_NL = group.take(rows.input_ids), group.attention_mask_NL
            answer_NLX = self._forward(ids_NL, mask_NL, aux, group)
            self._keep_last(answer_NLX, aux, group)
            if group is None:
                answer_BTX = answer_NLX
                continue
            if answer_BTX is None:
                answer_BTX = answer_NLX.new_zeros((*rows.shape, answer_NLX.shape[-1]))
            group.put(answer_NLX, answer_BTX)
        self._check_captured(aux.captured)
        return Eagle3TargetBatch.about(
            rows,
            aux_hidden_states=aux.result(),
            logits=answer_BTX if self._answers_logits() else None,
            last_hidden_states=None if self._answers_logits() else answer_BTX,
        )

    def _keep_last(self, answer: Tensor, aux: AuxBuffer, group: Group | None) -> None:
        """Copy the answer to `aux` if the last hidden state is one of the aux layers."""
        if self._depth in self.aux_layer_ids:
            aux.write(self._depth, answer, group)

    @property
    def _inner_layers(self) -> list[int]:
        return inner_layers(self.aux_layer_ids, self._depth)

    def _check_last_state(self) -> None:
        """Reject the last hidden state as an aux layer where the answer is logits: the state in
        front of the head is then not available."""
        if self._depth in self.aux_layer_ids and self._answers_logits():
            raise BadInput(
                f"aux layer {self._depth} is the last hidden state, which is not there with "
                f"{self.supervision} supervision",
                fix="use hidden supervision",
            )

    def _plan(self, documents: Documents, ids_BT: Tensor) -> list[list[int]]:
        """Which documents run in one pass, as its rows; no pass is larger than the batch itself."""
        return plan_groups(
            documents.lengths, overhead_tokens=self.overhead_tokens, max_tokens=ids_BT.numel()
        )

    def _groups(self, documents: Documents, ids_BT: Tensor) -> Sequence[Group]:
        """The groups in which the documents of a packed batch are run."""
        return group_documents(documents, self._plan(documents, ids_BT), device=ids_BT.device)

    def _check_captured(self, captured: dict[int, Tensor]) -> None:
        if missing := [i for i in self.aux_layer_ids if i not in captured]:
            raise RuntimeError(
                f"the target's forward returned nothing for decoder layers {missing} of "
                f"{self.aux_layer_ids}"
            )
