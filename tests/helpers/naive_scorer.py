"""Reference of ``compute_log_prob``: one forward of a transformers model per row and per branch."""

import torch

from verl.protocol import DataProto, object_array
from verl.records import BranchRequest, ScoreResult, SpanRequest


class NaiveScorer:
    """Scores rows, branches and spans with ``model``; ``calls`` records the inputs."""

    def __init__(self, model) -> None:
        self.model = model.eval()
        self.calls: list[DataProto] = []

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        return self.model(torch.tensor([ids])).logits[0].float()

    def measure(self, ids: list[int], start: int, end: int, temperature: float = 1.0):
        """Return log-probs and entropies of ``ids[start:end]``, each given all tokens before it."""
        log_probs = (self.logits(ids[:end])[start - 1 : end - 1] / temperature).log_softmax(-1)
        chosen = log_probs.gather(-1, torch.tensor(ids[start:end]).unsqueeze(-1)).squeeze(-1)
        return chosen, -(log_probs.exp() * log_probs).sum(-1)

    def score(
        self, segment: BranchRequest | SpanRequest, ids: list[int], start: int, end: int
    ) -> ScoreResult:
        chosen, entropy = self.measure(ids, start, end)
        return ScoreResult(
            step=segment.step,
            label=segment.label,
            logprob=chosen.mean().item(),
            entropy=entropy.mean().item(),
            mean_prob=chosen.exp().mean().item(),
            geometric_prob=chosen.mean().exp().item(),
            num_tokens=end - start,
        )

    def __call__(self, data: DataProto) -> DataProto:
        self.calls.append(data)
        width = data.batch["responses"].shape[1]
        old = torch.zeros(len(data), width)
        entropys = torch.zeros(len(data), width)
        branch_scores, span_scores = [], []
        for row in range(len(data)):
            real = data.batch["input_ids"][row][data.batch["attention_mask"][row].bool()].tolist()
            prompt = int(data.batch["attention_mask"][row][:-width].sum())
            log_probs, entropy = self.measure(
                real, prompt, len(real), data.meta_info["temperature"]
            )
            mask = data.batch["response_mask"][row].bool()
            old[row, : len(real) - prompt] = log_probs
            entropys[row, : len(real) - prompt] = entropy
            old[row][~mask] = 0.0
            entropys[row][~mask] = 0.0
            spans = data.non_tensor_batch["spans"][row]
            span_scores.append([self.score(span, real, span.start, span.end) for span in spans])
            branch_scores.append([])
            for branch in data.non_tensor_batch["branches"][row]:
                ids = real[: branch.start] + list(branch.token_ids)
                first = branch.start + branch.target_start
                branch_scores[-1].append(self.score(branch, ids, first, len(ids)))
        return DataProto.from_dict(
            {"old_log_probs": old, "entropys": entropys},
            {
                "branch_scores": object_array(branch_scores),
                "span_scores": object_array(span_scores),
            },
        )
