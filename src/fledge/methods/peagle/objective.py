"""P-EAGLE's objective: sampled rollouts of a parallel-drafting draft, all depths in one pass.

The interface is that of `RolloutTrainerModule`; docs/semantics.md has the rules. It differs
from EAGLE-3's objective in four points: rollouts are sampled, the draft runs all depths at once,
every supervised element is charged (not only covered ones), and weights do not decay with depth.
"""

from dataclasses import replace

import torch
from torch import Tensor

from fledge.core.head import HeadLike
from fledge.methods.eagle3.draft import LlamaEagle3DraftModel
from fledge.methods.losses.base import Loss
from fledge.methods.losses.registry import loss_of
from fledge.methods.peagle.draft import unroll_parallel
from fledge.methods.peagle.plan import ParallelPlan, plan_parallel
from fledge.methods.shared.objective import StepOptions
from fledge.methods.shared.rollout_objective import RolloutTrainerModule
from fledge.methods.shared.supervision import VocabularyTensors
from fledge.rollout.attention import AttentionKind
from fledge.rollout.context import ContextRanks
from fledge.rollout.slots import RowMasks, check_cod_options, check_counts


class PEagleTrainerModule(RolloutTrainerModule[ParallelPlan]):
    """The draft and its objective; call it with `**batch.to_trainer_inputs()`.

    `seed` (an argument of `prepare` and of the call) determines what is sampled. Without one, a
    draft in training mode draws a seed from torch's generator, and a draft in evaluation mode
    samples the same rollouts every time.

    `sequence_partitions` splits a batch into segments that run one after another: same loss, same
    gradients, less memory, one more forward pass. `balance_depths` gives every depth the same
    weight instead of every element. Loss, dtype and chunk options are those of
    `Eagle3TrainerModule`, with KL as the default loss.
    """

    draft_model: LlamaEagle3DraftModel

    def __init__(
        self,
        draft_model: LlamaEagle3DraftModel,
        *,
        selected_token_ids: Tensor,
        selected_token_mask: Tensor,
        num_depths: int,
        mask_token_id: int | None = None,
        down_sample_ratio: float = 0.7,
        down_sample_ratio_min: float = 0.2,
        sequence_partitions: int = 1,
        target_head: HeadLike | None = None,
        lk_loss_type: str | None = None,
        lk_kl_scale: float = 1.0,
        lk_kl_decay: float = 3.0,
        loss: str | Loss = "kl",
        balance_depths: bool = False,
        compute_dtype: torch.dtype | None = None,
        chunk_rows: int | None = None,
        attention: AttentionKind = "fast",
        context: ContextRanks | None = None,
    ) -> None:
        check_cod_options(num_depths, down_sample_ratio, down_sample_ratio_min)
        check_counts(sequence_partitions=sequence_partitions)
        _set_placeholder(draft_model, mask_token_id)
        vocabulary = VocabularyTensors(selected_token_ids, selected_token_mask)
        chosen = loss_of(loss, lk_loss_type, lk_kl_scale, lk_kl_decay)
        options = StepOptions(target_head, compute_dtype, chunk_rows, attention, context)
        super().__init__(draft_model, vocabulary, chosen, options)
        self.depths, self.balance_depths = num_depths, balance_depths
        self.down_sample_ratio = down_sample_ratio
        self.down_sample_ratio_min = down_sample_ratio_min
        self.sequence_partitions = sequence_partitions
        trained_with = {
            "num_depths": num_depths,
            "down_sample_ratio": down_sample_ratio,
            "down_sample_ratio_min": down_sample_ratio_min,
        }
        draft_model.config.update(trained_with)  # kept in config.json, for use without the run

    @property
    def _num_losses(self) -> int:
        return self.depths if self.balance_depths else 1

    def plan(self, masks: RowMasks, seed: int | None = None) -> ParallelPlan:
        return plan_parallel(
            masks,
            num_depths=self.depths,
            ratio=self.down_sample_ratio,
            ratio_min=self.down_sample_ratio_min,
            partitions=self.sequence_partitions,
            seed=self._seed(seed),
            device=self.selected_token_ids.device,
            ranks=self._ranks,
            quantum=self.quantum if self.draft_model.training else 0,
        )

    @property
    def can_be_even(self) -> bool:
        return self.sequence_partitions == 1 and self.context is None

    def quantum_for(self, tokens: int, *, sizes: int) -> int:
        """Each token may start a rollout."""
        return max(16, tokens // sizes)

    def _states(
        self, plan: ParallelPlan, aux_OD: Tensor, input_ids_O: Tensor, dtype: torch.dtype | None
    ) -> Tensor:
        return unroll_parallel(
            self.draft_model,
            aux_OD,
            input_ids_O,
            plan,
            compute_dtype=dtype,
            attention=self.attention,
        )

    def _charged(self, covered_N: Tensor) -> Tensor:
        """All of them: elements exist only where the loss mask is set."""
        return torch.ones_like(covered_N)

    def _coefficients(self, count_K: Tensor, dtype: torch.dtype) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        if self.balance_depths:
            return 1.0 / (self.depths * count_K.clamp_min(1).to(wide))
        return (1.0 / count_K.sum().clamp_min(1).to(wide)).expand(self.depths)


def _set_placeholder(draft: LlamaEagle3DraftModel, asked: int | None) -> None:
    """Set the token id for depths >= 1 in the config, which must have one if none is given."""
    config = draft.spec
    if not config.parallel_drafting:
        raise ValueError("parallel_drafting: the draft was built without it; set it in its config")
    token_id = config.mask_id if asked is None else asked
    if config.has_mask and config.mask_id != token_id:
        raise ValueError(f"mask_token_id: the draft was trained with {config.mask_id}, got {asked}")
    changed = replace(config, mask_token_id=token_id)
    changed.check()
    draft.spec, draft.config.mask_token_id = changed, token_id
