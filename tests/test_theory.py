"""Section 5 and appendix G of the paper: a two-layer attention-only transformer, built by hand.

Its heads are in superposition. Layer 1 copies the previous token's embedding. Layer 2 both looks up
facts (it attends to the subject) and does induction (it attends to what followed the trigger
before). Where induction dominates, removing both heads in one run takes the fact away with the
induction; removing what the heads added in a first, clean run leaves the fact (proposition 5.5).
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from juice.model.layout import AttentionLayer, Layout
from juice.model.steering_hooks import ModelHooks, SteeringPlan

N_SUBJECTS, N_NOISE, N_POSITIONS = 6, 14, 10
SUBJECTS = range(N_SUBJECTS)
ANSWERS = range(N_SUBJECTS, 2 * N_SUBJECTS)
TRIGGER = 2 * N_SUBJECTS
NOISE = range(TRIGGER + 1, TRIGGER + 1 + N_NOISE)
VOCABULARY = TRIGGER + 1 + N_NOISE
WIDTH = 3 * VOCABULARY + 2 * N_POSITIONS


def fact(subject: int) -> int:
    """Return the answer of a subject: the ground truth, a bijection."""
    return N_SUBJECTS + (subject + 2) % N_SUBJECTS


class Attention(nn.Module):
    def __init__(self, key_query: torch.Tensor, output_value: torch.Tensor) -> None:
        super().__init__()
        self.key_query = key_query
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.o_proj.weight = nn.Parameter(output_value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = x @ self.key_query @ x.transpose(1, 2)  # [rows, key, query]
        hidden = torch.ones_like(scores[0]).tril(-1).bool()
        weights = scores.masked_fill(hidden, -torch.inf).softmax(1)
        return self.o_proj(weights.transpose(1, 2) @ x)


class TwoLayers(nn.Module):
    """Equations 2-4 with orthogonal embeddings; c1 favours induction, c2 factual recall."""

    def __init__(self, c1: float, c2: float, c3: float = 3.0, c4: float = 3.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        basis = torch.linalg.qr(torch.randn(WIDTH, WIDTH, dtype=torch.float64))[0]
        self.phi, self.mu, remapped, self.positions, moved = basis.split(
            [VOCABULARY, VOCABULARY, VOCABULARY, N_POSITIONS, N_POSITIONS]
        )
        # W_OV of layer 1: phi(i) -> phi'(i), p_t -> p'_t
        copy = remapped.T @ self.phi + moved.T @ self.positions
        previous = 200 * self.positions[:-1].T @ self.positions[1:]
        look = c1 * torch.outer(copy @ self.phi[TRIGGER], self.phi[TRIGGER])
        look += c2 * torch.outer(self.phi[list(SUBJECTS)].sum(0), self.phi[TRIGGER])
        say = c3 * self.mu[list(NOISE)].T @ self.phi[list(NOISE)]
        say += c4 * self.mu[[fact(s) for s in SUBJECTS]].T @ self.phi[list(SUBJECTS)]
        self.layers = nn.ModuleList([Attention(previous, copy), Attention(look, say)])
        self.output = nn.Identity()
        parts = [
            AttentionLayer(i, layer, layer, layer.o_proj, n_heads=1, d_head=WIDTH)
            for i, layer in enumerate(self.layers)
        ]
        self.hooks = ModelHooks(Layout(tuple(parts), self.output))

    def forward(self, tokens: list[list[int]]) -> torch.Tensor:
        x = self.phi[torch.tensor(tokens)] + self.positions[: len(tokens[0])]
        for layer in self.layers:
            x = x + layer(x)
        return self.output(x[:, -1]) @ self.mu.T

    def likeliest(self, tokens: list[int]) -> int:
        return int(self([tokens])[0].argmax())


def sequences() -> list[tuple[list[int], list[int], list[int], int, int]]:
    """Return factual, inductive and conflicting sequences, with both answers to each."""
    made = []
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        noise = [NOISE[i] for i in torch.randperm(N_NOISE, generator=generator)[: N_POSITIONS - 1]]
        j = int(torch.randint(1, N_POSITIONS - 3, (1,), generator=generator))
        i = next(
            k
            for k in torch.randperm(N_POSITIONS - 1, generator=generator).tolist()
            if k not in (j, j + 1)
        )
        subject = int(torch.randint(N_SUBJECTS, (1,), generator=generator))
        factual = [*noise, TRIGGER]
        factual[i] = subject
        inductive = [*noise, TRIGGER]
        inductive[j] = TRIGGER
        both = list(inductive)
        both[i] = subject
        made.append((factual, inductive, both, fact(subject), noise[j + 1]))
    return made


def test_the_construction_solves_factual_recall_and_induction() -> None:
    model = TwoLayers(c1=9.0, c2=6.0)
    for factual, inductive, _, parametric, context in sequences():
        assert model.likeliest(factual) == parametric
        assert model.likeliest(inductive) == context


@pytest.mark.parametrize(("c1", "c2", "induction_wins"), [(9.0, 6.0, True), (6.0, 9.0, False)])
def test_the_stronger_coefficient_wins_the_conflict(
    c1: float, c2: float, *, induction_wins: bool
) -> None:
    model = TwoLayers(c1=c1, c2=c2)
    for _, _, conflict, parametric, context in sequences():
        assert model.likeliest(conflict) == (context if induction_wins else parametric)


def test_only_the_dual_run_gives_the_fact_where_induction_dominates() -> None:
    model = TwoLayers(c1=9.0, c2=6.0)
    removed = {layer: torch.tensor([[-1.0], [0.0]]) for layer in (0, 1)}
    for _, _, conflict, parametric, _ in sequences():
        with model.hooks.steer(SteeringPlan(dict.fromkeys(removed, torch.tensor([0, 1])), removed)):
            run_once = model([conflict, conflict])[0]
        with model.hooks.steer(SteeringPlan(dict.fromkeys(removed, torch.tensor([1, 1])), removed)):
            run_twice = model([conflict, conflict])[0]
        assert int(run_twice.argmax()) == parametric
        # One run without both heads has lost everything: what is left of its logits is rounding.
        assert run_once.abs().max() < 1e-6 < run_twice.max()
