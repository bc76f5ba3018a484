"""KCLA's weights beside those of exact softmax attention on the same queries and keys."""
import numpy as np
import torch
from scipy.stats import rankdata


def compare_with_softmax(stage):
    """Compares the depth weights of a stage's layers with softmax attention.

    Layer t's query and the keys of layers i = 1..t of the stage give p_i = softmax_i(Q_t.K_i / sqrt d). Softmax
    attention sees the stage alone: so the layer's depth weights w_i are those of the same blocks, divided by their sum.

    Args:
        stage (list[LayerRecord]): The layers of a stage, with queries, keys and depth weights.

    Returns:
        list[dict]: For each layer from the second on, arrays of (N, heads): ``total_variation``, sum_i |p_i - w_i| / 2;
        ``kl_divergence`` of p from w, sum_i p_i ln(p_i / w_i), in nats; ``rank_correlation``, Spearman's, NaN where
        either has all weights equal, KCLA's to six decimals.
    """
    keys = torch.stack([record.key for record in stage], 2).double()
    results = []
    for t, record in enumerate(stage[1:], 2):
        scores = (record.query[:, :, None].double() * keys[:, :, :t]).sum(3) / record.layer.head_channels**0.5
        exact = torch.softmax(scores, 2).cpu().numpy()
        weights = record.weights[:, :, -t:].cpu().numpy()
        weights = weights / weights.sum(2, keepdims=True)
        results.append(dict(total_variation=np.abs(exact - weights).sum(2) / 2,
                            kl_divergence=_kl_divergence(exact, weights),
                            rank_correlation=_rank_correlation(exact, weights)))
    return results


def _kl_divergence(p, q):
    tiny = np.finfo(p.dtype).tiny
    return (p * np.log(np.maximum(p, tiny) / np.maximum(q, tiny))).sum(-1)


def _rank_correlation(exact, weights):
    weights = np.round(weights, 6)  # smaller differences are those of single precision
    a, b = (ranks - ranks.mean(-1, keepdims=True) for ranks in (rankdata(exact, axis=-1), rankdata(weights, axis=-1)))
    with np.errstate(invalid='ignore'):
        return (a * b).sum(-1) / np.sqrt((a**2).sum(-1) * (b**2).sum(-1))
