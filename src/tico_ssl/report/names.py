"""Names of protocols, metrics and columns for people: `top1_k20` of `knn` is the kNN accuracy with k = 20."""

import re

from tico_ssl.results.metrics import Quantity
from tico_ssl.results.record import Line, Record, same_source

PROTOCOLS = {
    "alignment-uniformity": "Alignment and uniformity",
    "alpha-req": "α-ReQ",
    "few-shot": "Few-shot",
    "fine-tune": "Fine-tuning",
    "inaturalist2018": "iNaturalist 2018",
    "knn": "kNN",
    "lidar": "LiDAR",
    "linear": "Linear",
    "linear-augmented": "Linear with random crops",
    "neighbour-consistency": "Neighbour consistency",
    "places205": "Places-205",
    "rankme": "RankMe",
    "semi-supervised": "Semi-supervised",
    "svm": "SVM",
}
METRICS = {
    "top1": "accuracy",
    "top5": "top-5 accuracy",
    "map": "mean average precision",
    "map_at_r": "mean average precision at R",
    "nmi": "normalised mutual information",
    "ari": "adjusted Rand index",
    "box_ap": "box AP",
    "mask_ap": "mask AP",
    "alpha": "exponent α",
    "alpha_r2": "R² of the fit",
    "rankme": "effective rank",
    "lidar": "effective rank",
    "same_image": "views that find each other",
    "kept_neighbours": "neighbours kept",
    "knn_clean": "kNN accuracy, clean images",
    "knn_corrupted": "kNN accuracy, corrupted images",
    "knn_lost": "kNN accuracy lost",
    "linear_clean": "linear accuracy, clean images",
    "linear_corrupted": "linear accuracy, corrupted images",
    "linear_lost": "linear accuracy lost",
}
DETAILS = (
    (r"_k(\d+)", "k = {}"),
    (r"_t([\d.]+)", "temperature {}"),
    (r"_(\d+)shot", "{} per class"),
    (r"_([\d.]+)%", "{} % of the labels"),
    (r"_at_(\d+)", "first {}"),
    (r"(?<=ap)(\d\d)", "IoU 0.{}"),
)
"""Settings at the end of a metric's name, and how to say them."""
BEGINNINGS = {
    "train_": "{}, training images",
    "embedding_": "{} of the embeddings",
    "knn_": "kNN accuracy, {}",
    "linear_": "linear accuracy, {}",
}
COLUMNS = {"pixels": "raw pixels"}


def protocol_name(protocol: str) -> str:
    """Title of a protocol; one from elsewhere keeps its dotted path."""
    known = PROTOCOLS.get(protocol)
    return known or (protocol if "." in protocol else protocol[:1].upper() + protocol[1:].replace("-", " "))


def metric_name(quantity: Quantity) -> str:
    """Name of a metric within its protocol; protocols from elsewhere have named theirs themselves."""
    return quantity.name if "." in quantity.protocol else _said(quantity.name)


def _said(name: str) -> str:
    if name in METRICS:
        return METRICS[name]
    for beginning, form in BEGINNINGS.items():
        if name.startswith(beginning):
            return form.format(_said(name.removeprefix(beginning)))
    details: list[str] = []
    for pattern, form in reversed(DETAILS):
        if found := re.search(f"{pattern}$", name):
            details.insert(0, form.format(found[1]))
            name = name[: found.start()]
    plain = METRICS.get(name) or re.sub("[_-]", " ", name)
    return ", ".join([plain, *details])


def with_unit(quantity: Quantity) -> str:
    """Name within its protocol, and the unit: accuracy, k = 20 (%)."""
    unit = quantity.metric.unit
    return f"{metric_name(quantity)} ({unit})" if unit else metric_name(quantity)


def with_way(quantity: Quantity) -> str:
    """The same with the sign of which way is better."""
    return f"{with_unit(quantity)}\u00a0{quantity.way}".rstrip()


def full_name(quantity: Quantity) -> str:
    """Name with the protocol: kNN accuracy, k = 20."""
    return f"{protocol_name(quantity.protocol)} {metric_name(quantity)}"


def within(name: str) -> str:
    """A name inside a sentence: linear accuracy, kNN accuracy (k = 20). kNN, SVM and RankMe keep their letters."""
    name, _, details = name.partition(", ")
    lowered = name[0].lower() + name[1:] if name.partition(" ")[0][1:].islower() else name
    return f"{lowered} ({details})" if details else lowered


def column_name(representation: str) -> str:
    """Name of a column of results."""
    return COLUMNS.get(representation, representation)


def data_name(record: Record) -> str:
    """The data that a run was trained on."""
    source = record.setting("data.source", "?")
    return " + ".join(map(str, source)) if isinstance(source, list) else str(source)


def elsewhere(record: Record, result: Line) -> str:
    """Of a result on other data than the run's, on which: no accuracy is that of another data set."""
    data = result.get("data", {}).get("source")
    own = not isinstance(data, str) or same_source(data, data_name(record), str(record.environment.get("folder", "")))
    return "" if own else f", on {data}"
