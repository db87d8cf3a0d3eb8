"""Average precision of detections in per cent: COCO's by pycocotools, VOC's as in detectron2."""

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from tico_ssl.evaluations._detection.outlines import box_outline, coco_tools
from tico_ssl.evaluations._detection.pictures import Instance, Picture, Pictures
from tico_ssl.runtime.errors import UserError

Numbers = dict[str, float]
THRESHOLDS = np.arange(50, 100, 5)  # IoU in per cent; AP is the mean over these


@dataclass(frozen=True)
class Found:
    """Detections in an image: boxes (N, 4) in its pixels, scores, classes, and masks as run-length encodings."""

    boxes: np.ndarray
    scores: np.ndarray
    labels: np.ndarray
    masks: list[dict[str, Any]] | None = None


def score(pictures: Pictures, found: Sequence[Found], masks: bool) -> Numbers:
    """All metrics of a split, by its scoring rule."""
    if pictures.rule != "coco":
        return voc_scores(pictures.pictures, found, len(pictures.classes), pictures.rule == "voc2007")
    numbers = coco_scores(pictures.pictures, found, len(pictures.classes), "bbox")
    return numbers | (coco_scores(pictures.pictures, found, len(pictures.classes), "segm") if masks else {})


def coco_scores(
    pictures: Sequence[Picture], found: Sequence[Found], classes: int, kind: Literal["bbox", "segm"]
) -> Numbers:
    """COCO's AP, AP50 and AP75 of boxes or masks.

    For masks, an object without an outline counts as a crowd: detections in its box are ignored.
    """
    coco_tools()
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    results = [row for image, one in enumerate(found, 1) for row in _result_rows(image, one, kind)]
    at = np.full((len(THRESHOLDS), 1), -1.0)  # AP by threshold; -1 where a class has no object
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints its tables
        truth = COCO()
        truth.dataset = coco_truth(pictures, classes, kind)
        truth.createIndex()
        if results:
            evaluation = COCOeval(truth, truth.loadRes(results), kind)
            # Only all sizes and 100 detections per image: the rest of its table is not needed, and takes longer.
            wanted = evaluation.params
            wanted.areaRng, wanted.areaRngLbl, wanted.maxDets = wanted.areaRng[:1], wanted.areaRngLbl[:1], [100]
            evaluation.evaluate()
            evaluation.accumulate()
            at = evaluation.eval["precision"].reshape(len(THRESHOLDS), -1)
    name = "box" if kind == "bbox" else "mask"
    rows = {"": at, "50": at[THRESHOLDS == 50], "75": at[THRESHOLDS == 75]}
    means = {suffix: row[row > -1].mean() if (row > -1).any() else 0.0 for suffix, row in rows.items()}
    return {f"{name}_ap{suffix}": 100 * float(value) for suffix, value in means.items()}


def coco_truth(pictures: Sequence[Picture], classes: int, kind: str) -> dict[str, Any]:
    """The pictures in COCO's format, images and classes numbered from 1."""
    rows = [(image, instance) for image, one in enumerate(pictures, 1) for instance in one.instances]
    return {
        "info": {},
        "images": [{"id": i, "width": one.width, "height": one.height} for i, one in enumerate(pictures, 1)],
        "categories": [{"id": number, "name": str(number)} for number in range(1, classes + 1)],
        "annotations": [_truth_row(number, image, one, kind) for number, (image, one) in enumerate(rows, 1)],
    }


def _truth_row(number: int, image: int, instance: Instance, kind: str) -> dict[str, Any]:
    left, top, right, bottom = instance.box
    row = {
        "id": number,
        "image_id": image,
        "category_id": instance.label,
        "bbox": [left, top, right - left, bottom - top],
        "area": instance.area,
        "iscrowd": int(instance.crowd),
    }
    if kind == "segm":
        row["segmentation"] = instance.outline if instance.outline is not None else box_outline(instance.box)
        row["iscrowd"] = int(instance.crowd or instance.outline is None)
    return row


def _result_rows(image: int, found: Found, kind: str) -> list[dict[str, Any]]:
    rows = []
    for number, (box, score, label) in enumerate(zip(found.boxes.tolist(), found.scores, found.labels)):
        row: dict[str, Any] = {"image_id": image, "category_id": int(label), "score": float(score)}
        if kind == "bbox":
            row["bbox"] = [box[0], box[1], box[2] - box[0], box[3] - box[1]]
        else:
            assert found.masks is not None
            row["segmentation"] = found.masks[number]
        rows.append(row)
    return rows


def voc_scores(pictures: Sequence[Picture], found: Sequence[Found], classes: int, eleven_points: bool) -> Numbers:
    """VOC's average precision at IoU .50 to .95, its mean, at .50 and at .75; classes without objects are left out."""
    everything = [voc_matches(pictures, found, label) for label in range(1, classes + 1)]
    there = [matches for matches in everything if matches.objects]
    if not there:
        raise UserError("the test images have no object that is not difficult")
    at = {
        percent: 100 * float(np.mean([voc_ap(matches, percent / 100, eleven_points) for matches in there]))
        for percent in map(int, THRESHOLDS)
    }
    return {"box_ap": float(np.mean(list(at.values()))), "box_ap50": at[50], "box_ap75": at[75]}


class Match(NamedTuple):
    """A detection, the object that it overlaps most (image and index), and whether that is difficult."""

    overlap: float
    object: tuple[int, int]
    difficult: bool


class Matches(NamedTuple):
    """The detections of one class in descending order of score, and the number of objects to find."""

    objects: int
    detections: list[Match]


def voc_matches(pictures: Sequence[Picture], found: Sequence[Found], label: int) -> Matches:
    """Match every detection of a class to the object that it overlaps most."""
    objects, rows = 0, []
    for image, (picture, one) in enumerate(zip(pictures, found, strict=True)):
        truth = [instance for instance in picture.instances if instance.label == label]
        objects += sum(not instance.difficult for instance in truth)
        for place in np.flatnonzero(one.labels == label):
            overlaps = [inclusive_overlap(instance.box, one.boxes[place]) for instance in truth] or [-np.inf]
            best = int(np.argmax(overlaps))
            difficult = bool(truth) and truth[best].difficult
            rows.append((-float(one.scores[place]), Match(overlaps[best], (image, best), difficult)))
    return Matches(objects, [match for _, match in sorted(rows, key=lambda row: row[0])])


def voc_ap(matches: Matches, threshold: float, eleven_points: bool) -> float:
    """A detection is correct if its IoU exceeds the threshold and no better-scored detection took the object.

    Detections of difficult objects are ignored.
    """
    taken: set[tuple[int, int]] = set()
    right, wrong = np.zeros(len(matches.detections)), np.zeros(len(matches.detections))
    for place, match in enumerate(matches.detections):
        if match.overlap <= threshold or (not match.difficult and match.object in taken):
            wrong[place] = 1
        elif not match.difficult:
            right[place] = 1
            taken.add(match.object)
    right, wrong = np.cumsum(right), np.cumsum(wrong)
    precision = right / np.maximum(right + wrong, np.finfo(np.float64).eps)
    return average_precision(right / matches.objects, precision, eleven_points)


def inclusive_overlap(truth: Sequence[float], box: Sequence[float] | np.ndarray) -> float:
    """Intersection over union in VOC's pixels: numbered from 1, the last one inclusive."""
    a, b = ((x0 + 1, y0 + 1, x1, y1) for x0, y0, x1, y1 in (truth, box))
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]) + 1)
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]) + 1)
    areas = [(one[2] - one[0] + 1) * (one[3] - one[1] + 1) for one in (a, b)]
    return float(width * height / (sum(areas) - width * height))


def average_precision(recall: np.ndarray, precision: np.ndarray, eleven_points: bool) -> float:
    """VOC 2007: the mean over recalls 0, .1, ..., 1 of the best precision at that recall or more. Later years: the area
    under the curve of that best precision."""
    if eleven_points:
        points = np.arange(0.0, 1.1, 0.1)
        return float(np.mean([precision[recall >= point].max(initial=0.0) for point in points]))
    recall = np.concatenate([[0.0], recall, [1.0]])
    precision = np.maximum.accumulate(np.concatenate([[0.0], precision, [0.0]])[::-1])[::-1]
    return float(np.sum(np.diff(recall) * precision[1:]))
