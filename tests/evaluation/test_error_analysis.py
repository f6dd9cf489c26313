"""Diagnosis against twins that look at one image after the other."""

import pytest
import torch
from protocol_toys import QUICK, blurred, stream

from conftest import tiny_backbone
from protosteer.evaluation.protocol import run_stream
from protosteer.evidence.passes import CONFIDENT
from protosteer.methods.cpp import CPP
from protosteer.methods.ncm import NCM
from protosteer.methods.plain_images import PlainImages
from protosteer.methods.protosteer import Protosteer


@pytest.mark.parametrize("blurry", [False, True])
@pytest.mark.parametrize("prompts", [True, False])
def test_errors_by_the_papers_rule_agree_with_a_twin_that_looks_at_one_image_after_the_other(prompts, blurry):
    tasks = blurred(stream()) if blurry else stream()
    method = CPP(tiny_backbone(), QUICK.replace(prompts=prompts, neighbours=2))
    run = run_stream(method, tasks)
    records, backbone = method.learner.memory.tasks, method.backbone
    assert run.diagnosis is not None
    bins_used = set()
    for j, (task, row) in enumerate(zip(tasks, run.diagnosis["tasks"], strict=True)):
        names = ("accuracy", "not_retrieved", "wrong_prompt_won", "wrong_class")
        found = dict.fromkeys((*names, "true_task_with_prompt", "true_task_without_prompt"), 0)
        for i, label in enumerate(task.test_labels):
            pixels = task.test.pixels([i])
            query = backbone.embed_pixels(pixels)[0]
            keys = [(cosine(query, key), t) for t, r in enumerate(records) for c in r.classes for key in c.keys]
            tried = {t for _, t in sorted(keys, reverse=True)[:2]}
            best = (-2.0, "", -1)
            for t in sorted(tried):
                seen = backbone.embed_pixels(pixels, records[t].prompt)[0]
                for record in records:
                    for known in record.classes:
                        best = max(best, *((cosine(seen, v), known.name, t) for v in known.values.means))
            mine = {t for t, record in enumerate(records) if label in record.class_names}
            assert j in mine and (len(mine) > 1) <= blurry
            outcome = "accuracy" if best[1] == label else "wrong_class" if mine & tried else "not_retrieved"
            if outcome == "wrong_class" and prompts and best[2] not in mine:
                outcome = "wrong_prompt_won"
            found[outcome] += 1
            own = backbone.embed_pixels(pixels, records[j].prompt)[0]
            known = [c for c in records[j].classes if c.name in task.classes]
            inside = [(cosine(own, v), c.name) for c in known for v in c.values.means]
            plain = [(cosine(query, k), c.name) for c in known for k in c.keys]
            found["true_task_with_prompt"] += max(inside)[1] == label
            found["true_task_without_prompt"] += max(plain)[1] == label
            bins_used.add(outcome)
        for name, count in found.items():
            assert row[name] == pytest.approx(100 * count / len(task.test_labels)), name
        assert 0 < row["key_spread"] <= 1 and (row["key_spread"] == row["value_spread"]) != prompts
    assert run.diagnosis["mean"]["accuracy"] == pytest.approx(run.figures()["last_accuracy"])
    assert len(bins_used) >= 2 + (not blurry), "a stream with other errors would test more"


@pytest.mark.parametrize("blurry", [False, True])
def test_errors_by_evidence_agree_with_a_twin_that_looks_at_one_image_after_the_other(blurry):
    tasks, kinds = blurred(stream(noise=120)) if blurry else stream(noise=120), set()
    method = Protosteer(tiny_backbone(), QUICK.replace(rule="evidence"))
    run = run_stream(method, tasks)
    assert run.diagnosis is not None
    for task, row in zip(tasks, run.diagnosis["tasks"], strict=True):
        names = ("accuracy", "task_not_tried", "coarse_wrong", "fine_wrong")
        found = dict.fromkeys((*names, "coarse_accuracy", "true_task_accuracy", "confidence", "passes"), 0.0)
        for i, label in enumerate(task.test_labels):
            said = method.learner.predict(task.test.pixels([i]))
            coarse = coarse_logits(method, task.test.pixels([i]))
            guess, sure = method.classes[coarse.index(max(coarse))], max(softmax(coarse)) >= CONFIDENT
            kind = "fine_wrong"
            if said.labels[0] == label:
                kind = "accuracy"
            elif not set(said.candidates[0]) & set(method.memory.owners[label]):
                prompted = [t.prompt is not None for t in method.memory.tasks if label in t.class_names]
                unsure = any(prompted) and not sure
                kind = "task_not_tried" if unsure else "coarse_wrong"
            kinds.add(kind)
            found[kind] += 100
            found["coarse_accuracy"] += 100 * (guess == label)
            inside = [(float(said.scores[0, method.classes.index(c)]), c) for c in task.classes]
            found["true_task_accuracy"] += 100 * (max(inside)[1] == label)
            found["confidence"] += 100 * float(said.probabilities.max())
            found["passes"] += int(said.passes[0])
        for name, total in found.items():
            assert row[name] == pytest.approx(total / len(task.test_labels), abs=1e-2), name
    mean = run.diagnosis["mean"]
    assert mean["accuracy"] == pytest.approx(run.figures()["last_accuracy"])
    assert len(kinds) >= 4 - blurry, "a stream with other errors would test more"


def coarse_logits(method: Protosteer, pixels: torch.Tensor) -> list[float]:
    """Of one image: the first view, and the second with it where that leaves the image unsure."""
    read = method.learner.reader.classifier
    first, logits = read.passes[0], None
    for space in read.passes:
        prompt = None if space.prompt is None else read.index.prompts[space.prompt]
        scores = space.scorer.scores(method.backbone.embed_pixels(pixels, prompt))[0][0]
        if logits is None:
            logits, before = first.solo_weight * scores, scores
        elif max(softmax(logits.tolist())) < CONFIDENT:
            logits = first.weight * before + space.weight * scores
    return logits[read.sorted_position].tolist()


def softmax(logits: list[float]) -> list[float]:
    return torch.tensor(logits, dtype=torch.double).softmax(dim=0).tolist()


def test_without_prompts_all_errors_are_of_coarse_evidence():
    run = run_stream(Protosteer(tiny_backbone(), QUICK.replace(rule="evidence", prompts=False)), stream())
    assert run.diagnosis is not None
    mean = run.diagnosis["mean"]
    assert mean["task_not_tried"] == mean["fine_wrong"] == 0 < mean["coarse_wrong"]
    assert mean["coarse_accuracy"] == mean["accuracy"] == pytest.approx(run.figures()["last_accuracy"])


def test_any_other_method_is_told_where_its_errors_went():
    tasks, method = stream(), NCM(tiny_backbone(), NCM.settings_class())
    run = run_stream(method, tasks)
    assert run.diagnosis is not None
    for task, row in zip(tasks, run.diagnosis["tasks"], strict=True):
        predicted = [method.classes[k] for k in method.predict(PlainImages(method, task.test)).tolist()]
        pairs = list(zip(predicted, task.test_labels, strict=True))
        same = sum(p != label and p in task.classes for p, label in pairs)
        other = sum(p not in task.classes for p, label in pairs)
        assert row["same_task"] == pytest.approx(100 * same / len(pairs))
        assert row["other_task"] == pytest.approx(100 * other / len(pairs))
        assert row["accuracy"] + row["same_task"] + row["other_task"] == pytest.approx(100)
    assert run.diagnosis["mean"]["other_task"] > 0 and run.diagnosis["mean"]["same_task"] > 0


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))
