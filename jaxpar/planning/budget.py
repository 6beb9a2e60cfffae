"""What a whole run costs: FLOPs, time, device hours, energy, and the size of model that a budget is best spent on."""

HOUR, DAY, YEAR = 3600.0, 86400.0, 365.25 * 86400


def training_flops(num_parameters: float, num_tokens: float, per_pair: float = 6) -> float:
    """6 N D; 8 with the forward pass computed again. Source: Kaplan et al. (arXiv 2001.08361), section 2.1."""
    return per_pair * num_parameters * num_tokens


def training_seconds(flops: float, num_devices: float, peak_flops: float, mfu: float = 1.0) -> float:
    return flops / (num_devices * peak_flops * mfu)


def implied_mfu(num_parameters: float, num_tokens: float, device_hours: float, peak_flops: float) -> float:
    """Of a whole run, restarts included: 6 N D over the peak of the hours paid."""
    return training_flops(num_parameters, num_tokens) / (device_hours * HOUR * peak_flops)


def energy_mwh(num_chips: float, days: float, watts: float, pue: float = 1.0) -> float:
    """Of a run. Source: Patterson et al. (arXiv 2104.10350), section 2."""
    return num_chips * days * 24 * watts * pue / 1e6


CHINCHILLA_FIT = {"E": 1.69, "A": 406.4, "B": 410.7, "alpha": 0.34, "beta": 0.28}
"""Loss E + A / N^alpha + B / D^beta. Source: Hoffmann et al. (arXiv 2203.15556), equation 10."""
CHINCHILLA_FIT_UNROUNDED = [1.6934, 406.401, 410.7228, 0.33917084, 0.2849083]
"""E, A, B, alpha, beta. Source: the LaTeX of arXiv 2203.15556, as in karpathy/nanoGPT, scaling_laws.ipynb."""
CHINCHILLA_TOKENS_PER_PARAMETER = 20
"""Source: Hoffmann et al. (arXiv 2203.15556), table 3."""


def chinchilla_loss(num_parameters: float, num_tokens: float) -> float:
    fit = CHINCHILLA_FIT
    return fit["E"] + fit["A"] / num_parameters ** fit["alpha"] + fit["B"] / num_tokens ** fit["beta"]


def chinchilla_optimum(flops: float) -> tuple[float, float]:
    """(parameters, tokens) of least loss for 6 N D FLOPs, in closed form. Source: Hoffmann et al. (arXiv 2203.15556),
    equation 4."""
    fit = CHINCHILLA_FIT
    alpha, beta = fit["alpha"], fit["beta"]
    g = (alpha * fit["A"] / (beta * fit["B"])) ** (1 / (alpha + beta))
    return g * (flops / 6) ** (beta / (alpha + beta)), (flops / 6) ** (alpha / (alpha + beta)) / g


def chinchilla_flops(
    num_layers: int, embed_dim: int, num_heads: int, head_dim: int, mlp_dim: int, seq_len: int
) -> float:
    """Training FLOPs of one sequence, as Hoffmann et al. (arXiv 2203.15556), appendix F, count them: softmax too, and
    the embeddings and logits not, whatever the text says (table A4 shows it)."""
    attention = num_heads * head_dim
    layer = 2 * 3 * seq_len * embed_dim * attention
    layer += 2 * seq_len * seq_len * attention + 3 * num_heads * seq_len * seq_len + 2 * seq_len * seq_len * attention
    layer += 2 * seq_len * attention * embed_dim + 2 * seq_len * 2 * embed_dim * mlp_dim
    return 3.0 * num_layers * layer


def checkpoint_bytes(num_parameters: float) -> float:
    """Parameters and Adam's two moments, in float32."""
    return 12 * num_parameters


def failures_per_day(failures: float, days: float) -> float:
    return failures / days


def hours_between_failures(failures: float, days: float) -> float:
    return days * 24 / failures
