"""ParallelSpec's training: masks, labels and losses of groups are those of drafting after every token."""

from dataclasses import replace

import pytest
import torch

from lib.drafter_checks import Recording, propose
from lib.families import HIDDEN_SIZE, VOCAB_SIZE, build_model
from lib.objectives import read_by
from lib.parallelspec_equations import VARIANTS, Equations, each_variant, make_network
from lib.tensors import assert_near
from specdec.models.networks.layer import MaskedAttention
from specdec.models.networks.parallelspec import group_mask
from specdec.models.target.target import Target
from specdec.training.objectives.eagle import EagleObjective
from specdec.training.objectives.parallelspec import ParallelSpecObjective
from specdec.trees.shape import TreeShape


def make_objective(model, generator, settings=None, **switches):
    return ParallelSpecObjective(make_network(model, generator, **(settings or {})), Target(model), **switches)


def make_batch(model, generator, batch_size=2, length=11):
    """A batch as the target sees it, with a padded row, text that is not to be learnt, and labels of their own."""
    tokens = torch.randint(1, VOCAB_SIZE, (batch_size, length), generator=generator)
    loss_mask = torch.ones(batch_size, length, dtype=torch.bool)
    loss_mask[0, :3] = False
    loss_mask[1, 7:] = False
    tokens[1, 7:] = 0
    labels = torch.randint(1, VOCAB_SIZE, (batch_size, length), generator=generator)
    return read_by(model, tokens, loss_mask, labels=labels)


def test_the_mask_of_training_is_that_of_figure_3():
    # three groups of a token and two masks; rows see columns
    expected = [
        "100 000 000",
        "110 000 000",
        "111 000 000",
        "100 100 000",
        "100 110 000",
        "100 111 000",
        "100 100 100",
        "100 100 110",
        "100 100 111",
    ]
    index = torch.arange(9)
    seen = ["".join(map(str, row)) for row in group_mask(index // 3, index % 3).int().tolist()]
    assert seen == [row.replace(" ", "") for row in expected]


@each_variant
@torch.no_grad()
def test_the_loss_is_that_of_drafting_after_every_token(settings, generator):
    """Equations 3 and 4, from what the network says in drafting after every beginning of the text."""
    model = build_model("llama")
    is_eagle = settings["variant"] == "eagle"
    objective = make_objective(model, generator, settings, decay=0.7).eval()
    batch = make_batch(model, generator)
    equations = Equations(objective.network, model.get_input_embeddings().weight)
    entropies, soft_entropies, errors = ([[] for _ in range(4)] for _ in range(3))
    for row, tokens in enumerate(batch.tokens):
        for last in range(is_eagle, len(tokens)):  # a state is needed before the token
            states = equations.states(tokens[: last + 1].tolist(), batch.hidden[row])
            for member, state in enumerate(states):
                place = last + 1 + member
                if place < len(tokens) and batch.loss_mask[row, place]:
                    logps = (model.lm_head.weight.double() @ state).log_softmax(-1)
                    entropies[member].append(-logps[batch.labels[row, place]])
                    target = batch.scores.logits[row, place - 1].double().softmax(-1)
                    soft_entropies[member].append(-(target * logps).sum())
                    difference = (state - batch.hidden[row, place - 1].double()).abs()
                    errors[member].append(torch.where(difference < 1, difference**2 / 2, difference - 0.5).mean())

    def mean(parts):
        return float(sum(parts) / len(parts))

    parts = {name: float(value) for name, value in objective(batch).items()}
    if is_eagle:
        regression, classification = sum(map(mean, errors)), sum(map(mean, entropies))
        members = zip(errors, entropies, strict=True)
        loss = sum(0.7**k * (mean(error) + 0.1 * mean(entropy)) for k, (error, entropy) in enumerate(members))
        expected = {"loss": loss, "regression": regression, "classification": classification}
        assert parts == pytest.approx(expected, rel=1e-5)
        objective.soft_labels, objective.classification_weight, objective.decay = True, 2.0, 1.0
        soft = sum(map(mean, soft_entropies))
        assert float(objective(batch)["classification"]) == pytest.approx(soft, rel=1e-5)
        assert float(objective(batch)["loss"]) == pytest.approx(regression + 2 * soft, rel=1e-5)
    else:
        expected = {f"depth_{member + 1}": mean(entropy) for member, entropy in enumerate(entropies)}
        expected["loss"] = sum(0.7**member * mean(entropy) for member, entropy in enumerate(entropies))
        assert parts == pytest.approx(expected, rel=1e-5)


@each_variant
@torch.no_grad()
def test_fewer_groups_have_the_states_of_all(settings, generator):
    """With masks at some groups only, every state that is left is what it was, and each group has its turn."""
    model = build_model("llama")
    objective = make_objective(model, generator, settings, num_groups=3)
    batch = make_batch(model, generator)
    whole = objective.eval()._states(batch.tokens, batch.hidden)
    assert all(len(groups) == batch.tokens.shape[1] for groups, _ in whole)
    drawn = set()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for _ in range(30):
            part = objective.train()._states(batch.tokens, batch.hidden)
            assert [len(groups) for groups, _ in part] == [batch.tokens.shape[1]] + [3] * (len(part) - 1)
            for (groups, states), (_, expected) in zip(part, whole, strict=True):
                assert_near(states, expected[:, groups])
            drawn |= set(part[1][0].tolist())
    assert drawn == set(range(batch.tokens.shape[1]))


@each_variant
@torch.no_grad()
def test_the_loss_with_fewer_groups_is_that_of_all_on_average(settings, generator):
    model = build_model("llama")
    objective = make_objective(model, generator, settings, num_groups=4)
    objective.noise = 0.0
    batch = make_batch(model, generator)
    batch = replace(batch, loss_mask=torch.ones_like(batch.loss_mask))  # every group has as many labels as any other
    expected = objective.eval()(batch)["loss"]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        losses = torch.stack([objective.train()(batch)["loss"] for _ in range(200)])
    assert losses.std() > 0
    assert losses.mean().item() == pytest.approx(expected.item(), rel=0.02)


@each_variant
def test_training_and_drafting_agree(settings, generator):
    """The loss of a text on which only one place is to be learnt, from the logits of one draft."""
    model = build_model("llama")
    objective = make_objective(model, generator, settings).eval()
    batch = make_batch(model, generator, batch_size=2)
    place = 9
    loss_mask = torch.zeros_like(batch.loss_mask)
    loss_mask[0, place] = True
    parts = objective(replace(batch, loss_mask=loss_mask))
    entropies = []
    for member in range(4):
        root, choose = place - 1 - member, Recording()
        propose(objective.drafter(TreeShape.chain(4)), model, batch.tokens[0, :root], batch.tokens[0, root], choose)
        logps = choose.logits[0][0, member].log_softmax(-1)
        entropies.append(-float(logps[batch.labels[0, place]]))
    if settings["variant"] == "medusa":
        assert [parts[f"depth_{depth}"].item() for depth in range(1, 5)] == pytest.approx(entropies, rel=1e-4)
    else:
        assert parts["classification"].item() == pytest.approx(sum(entropies), rel=1e-4)


@each_variant
def test_training_begins_with_masks_as_loud_as_tokens(settings):
    model = build_model("llama")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        masks = ParallelSpecObjective.new(Target(model), num_masks=3, **settings).network.masks
    assert masks.std().item() == pytest.approx(model.get_input_embeddings().weight.std().item(), rel=0.2)


@torch.no_grad()
def test_training_may_begin_with_a_head_of_eagle(tmp_path, generator):
    """Its weights are the network's, and before any step the first guess after a text is EAGLE's."""
    model = build_model("llama")
    target = Target(model)
    eagle = EagleObjective.new(target)

    def save(objective, name):
        drafter = objective.drafter(TreeShape.chain(2))
        drafter.bind(target)
        drafter.save_pretrained(tmp_path / name)

    save(eagle, "eagle")
    objective = ParallelSpecObjective.new(target, eagle=tmp_path / "eagle", num_masks=2).eval()
    batch = make_batch(model, generator)
    _, states = objective._states(batch.tokens[:, 1:-1], batch.hidden[:, :-2])[0]
    positions = torch.arange(states.shape[1])[None]
    embedded = model.get_input_embeddings()(batch.tokens[:, 1:-1])
    expected = eagle.network(batch.hidden[:, :-2], embedded, positions, MaskedAttention())
    assert_near(states, expected)
    assert objective.network.masks.any()

    third = EagleObjective.new(target, version=3, tap_layers=(0, 1))
    save(third, "eagle3")
    save(EagleObjective.new(target, intermediate_size=8), "narrow")
    save(objective, "parallelspec")
    for settings, message in (
        (
            {"eagle": tmp_path / "eagle3"},
            "eagle: expected a drafter of EAGLE-1 for the eagle variant, got one of EAGLE-3",
        ),
        ({"eagle": tmp_path / "eagle", "variant": "medusa"}, "got one of EAGLE-1 for the medusa variant"),
        ({"eagle": tmp_path / "narrow"}, "eagle: expected the sizes of this network, got others for layer.mlp.down"),
        ({"eagle": tmp_path / "parallelspec"}, "eagle: expected a drafter of EAGLE-1, got one of kind parallelspec"),
    ):
        with pytest.raises(ValueError, match=message):
            ParallelSpecObjective.new(target, **settings)


@torch.no_grad()
def test_noise_is_on_features_and_in_training_only(generator):
    model = build_model("llama")
    batch = make_batch(model, generator)
    objective = make_objective(model, generator, VARIANTS["eagle"], noise=0.5)
    clean = objective.eval()(batch)["loss"]
    assert torch.equal(objective(batch)["loss"], clean)
    assert not torch.equal(objective.train()(batch)["loss"], clean)
    objective.noise = 0.0
    assert torch.equal(objective(batch)["loss"], clean)


@torch.no_grad()
def test_what_stands_in_the_place_of_a_masks_feature(generator):
    model = build_model("llama")
    features = torch.randn(2, 5, HIDDEN_SIZE, generator=generator)
    last, trained = (make_network(model, generator, mask_feature=kind) for kind in ("last", "trained"))
    for network, features_matter in ((last, True), (trained, False)):
        inputs = network.read_masks(features, 2)
        assert inputs.shape == (2, 5, 2, HIDDEN_SIZE)
        assert torch.equal(inputs, network.read_masks(features + 1, 2)) != features_matter
        assert torch.allclose(inputs[:, 3], network.read_masks(features[:, 3], 2), atol=1e-5)


def test_the_recipe_is_that_of_the_variant(generator):
    model = build_model("llama")
    medusa = make_objective(model, generator, VARIANTS["medusa"]).recipe
    eagle = make_objective(model, generator, VARIANTS["eagle"]).recipe
    assert (medusa.learning_rate, medusa.betas, medusa.epochs) == (5e-4, (0.9, 0.999), 20)
    assert (eagle.learning_rate, eagle.betas, eagle.epochs) == (5e-5, (0.9, 0.95), 40)
    assert {medusa.batch_size, eagle.batch_size} == {32}
    assert {medusa.weight_decay, eagle.weight_decay} == {0.0}
    decays = [make_objective(model, generator, VARIANTS[variant]).decay for variant in ("medusa", "eagle")]
    assert decays == [0.8, 1.0]
