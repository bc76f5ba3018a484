"""Logs in training what the layer attentions do."""
from contextlib import ExitStack

import torch
from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from .recording import find_backbone, recorded
from .statistics import by_stage, key_alignment, mean_of_pairs, retention


@HOOKS.register_module()
class LayerAttentionHook(Hook):
    """Logs key alignment, the weights of early blocks and the gates in training.

    ``custom_hooks = [dict(type='LayerAttentionHook', interval=50)]`` in a config. Every ``interval`` iterations the
    main process measures, on its images of that iteration, for each stage s, as ``layer_attention/stage{s}/...``:

    - ``key_alignment``: mean cosine similarity of the keys of the stage's layers
    - ``first_block_weight``: depth weight of the stage's first block in its last layer
    - ``earlier_stages_weight``: KCLA's depth weight of all earlier stages there
    - ``gate_mean``, ``gate_std``: of all gates of the stage, of its layers, heads and images

    as far as the type of layer attention has them. `LoggerHook` writes the latest to the log and to all visualisation
    backends; let its interval divide this one. The iterations between cost nothing.

    Args:
        interval (int): Iterations from one measurement to the next. Defaults to 50.

    Raises:
        ValueError: If ``interval`` is not a positive integer; before training, if the model has no layer attention.
    """

    def __init__(self, interval=50):
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise ValueError(f'interval must be a positive integer, got {interval!r}')
        self.interval = interval
        self._recording = ExitStack()
        self._records = None

    def before_train(self, runner):
        self._backbone = find_backbone(runner.model)

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if self.every_n_train_iters(runner, self.interval) and is_main_process():
            self._records = self._recording.enter_context(recorded(self._backbone))

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if self._records is None:
            return
        self._recording.close()
        for stage in by_stage(self._records):
            for name, value in self._measure(stage).items():
                runner.message_hub.update_scalar(f'train/layer_attention/stage{stage[0].stage}/{name}', value)
        self._records = None

    @staticmethod
    def _measure(stage):
        measured = {}
        if stage[0].key is not None and len(stage) > 1:
            measured['key_alignment'] = mean_of_pairs(key_alignment(stage)).mean().item()
        first_block, earlier_stages = retention(stage)
        if first_block is not None:
            measured['first_block_weight'] = first_block.mean().item()
        if earlier_stages is not None:
            measured['earlier_stages_weight'] = earlier_stages.mean().item()
        if stage[0].gate is not None:
            gates = torch.stack([record.gate for record in stage]).double()
            measured['gate_mean'], measured['gate_std'] = gates.mean().item(), gates.std(unbiased=False).item()
        return measured
