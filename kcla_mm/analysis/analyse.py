"""Analyses a backbone on images, one batch after the other, in constant memory."""
from collections import defaultdict

import numpy as np
import torch

from kcla_mm.layer_attention import KCLA

from .exact import compare_with_softmax
from .recording import memory_cut, recorded
from .statistics import by_stage, key_alignment, mean_of_pairs, retention


class RunningMean:
    """Mean and standard deviation over images of arrays, NaN left out."""

    def __init__(self):
        self.count = self.total = self.squares = 0.

    def add(self, values):
        """Adds values of N images, (N, ...)."""
        values = np.asarray(values.cpu() if isinstance(values, torch.Tensor) else values, np.float64)
        known = np.isfinite(values)
        values = np.where(known, values, 0)
        self.count = self.count + known.sum(0)
        self.total = self.total + values.sum(0)
        self.squares = self.squares + (values**2).sum(0)

    def mean(self):
        with np.errstate(invalid='ignore'):
            return np.divide(self.total, self.count)

    def std(self):
        with np.errstate(invalid='ignore'):
            return np.sqrt(np.maximum(np.divide(self.squares, self.count) - self.mean()**2, 0))

    def summary(self):
        """Both as lists, rounded, None for NaN."""
        return dict(mean=plain(self.mean()), std=plain(self.std()))


class Analysis:
    """What a backbone's layer attentions do, averaged over images.

    Args:
        backbone (LayerAttentionMixin): The backbone, in eval mode.
    """

    def __init__(self, backbone):
        self.backbone = backbone
        self.means = defaultdict(RunningMean)
        self.records = None  # of the latest images

    @torch.no_grad()
    def add(self, inputs):
        """Analyses a batch of images, (N, 3, H, W), as the backbone gets them."""
        with recorded(self.backbone) as records:
            features = self.backbone(inputs)
        self.records = list(records)
        for index, record in enumerate(records):
            self.means['branch', index].add(record.branch)
            for name in ('weights', 'gate'):
                value = getattr(record, name)
                if value is not None:
                    self.means[name, index].add(value)
            if record.weights is not None:
                self.means['mean_weights', index].add(record.weights.mean(1))
        start = 0
        for stage in by_stage(records):
            self._add_stage(stage, start)
            start += len(stage)
        self._add_cuts(inputs, features)

    def _add_stage(self, stage, start):
        number = stage[0].stage
        if stage[0].key is not None:
            alignment = key_alignment(stage)
            self.means['alignment', number].add(alignment)
            self.means['pairs', number].add(mean_of_pairs(alignment).mean(1))
            self.means['neighbours', number].add(mean_of_pairs(alignment, distance=1).mean(1))
            self.means['absolute', number].add(mean_of_pairs(alignment.abs()).mean(1))
        for name, values in zip(('first_block', 'earlier_stages'), retention(stage)):
            if values is not None:
                self.means[name, number].add(values)
        if isinstance(stage[0].layer, KCLA):
            for index, record in enumerate(stage, start):
                self.means['score', index].add(record.layer.score(record.key))
            if stage[0].gate is not None:
                for index, compared in enumerate(compare_with_softmax(stage), start + 1):
                    for name, values in compared.items():
                        self.means[name, index].add(values)

    def _add_cuts(self, inputs, features):
        for record in self.records:
            if isinstance(record.layer, KCLA) and record.stage > 1 and record.layer.block == 0:
                with memory_cut(record.layer):
                    changed = self.backbone(inputs)
                changes = [(cut - whole).flatten(1).norm(dim=1) / whole.flatten(1).norm(dim=1)
                           for cut, whole in zip(changed, features)]
                self.means['cut', record.stage].add(torch.stack(changes, 1))

    def result(self):
        """All numbers, of lists and dicts that JSON can hold: averages over the images, ``std`` their spread.

        Returns:
            dict: ``layers``, ``stages``, each a list of dicts, and ``depth_weights``.
        """
        layers = [dict(name=record.name, stage=record.stage, block=record.layer.block,
                       heads=getattr(record.layer, 'heads', None), temperature=_temperature(record.layer),
                       **self._summaries(index, 'branch', 'gate', 'score', 'total_variation', 'kl_divergence',
                                         'rank_correlation'))
                  for index, record in enumerate(self.records)]
        stages = []
        for stage in by_stage(self.records):
            number = stage[0].stage
            alignment = None
            if ('alignment', number) in self.means:
                heads = self.means['alignment', number].mean()
                alignment = dict(heads=plain(heads), mean=plain(heads.mean(0)),
                                 **self._summaries(number, 'pairs', 'neighbours', 'absolute'))
            stages.append(dict(stage=number, blocks=len(stage), key_alignment=alignment,
                               **self._summaries(number, 'first_block', 'earlier_stages', 'cut')))
        weights = None
        if ('weights', 0) in self.means:
            rows = range(len(self.records))
            weights = dict(heads=[plain(self.means['weights', row].mean()) for row in rows],
                           mean=[plain(self.means['mean_weights', row].mean()) for row in rows],
                           std=[plain(self.means['mean_weights', row].std()) for row in rows])
        return dict(layers=layers, stages=stages, depth_weights=weights)

    def _summaries(self, index, *names):
        return {name: self.means[name, index].summary() if (name, index) in self.means else None for name in names}


def calibrate(backbone, batches):
    """Takes the statistics of BatchNorms that have none yet from images, as training would.

    Without them an untrained network's features grow from block to block as they never do in training.

    Args:
        backbone (nn.Module): The network, in eval mode.
        batches (Iterable[Tensor]): Images, (N, 3, H, W).
    """
    norms = [m for m in backbone.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)
             and m.track_running_stats and not m.running_mean.any() and (m.running_var == 1).all()]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = None  # plain averages over the batches
        norm.reset_running_stats()
        norm.train()
    with torch.no_grad():
        for inputs in batches:
            backbone(inputs)
    for norm, momentum in zip(norms, momenta):
        norm.momentum = momentum
        norm.eval()


def plain(array):
    """An array as lists of numbers of six digits, None for NaN."""
    if array is None:
        return None
    if np.ndim(array):
        return [plain(value) for value in array]
    return float(f'{array:.6g}') if np.isfinite(array) else None


def _temperature(layer):
    return plain(layer.log_temperature.detach().exp().cpu().numpy()) if isinstance(layer, KCLA) else None
