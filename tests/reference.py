"""The oracle: the published algorithms in plain float64 numpy.

Written from the papers, not from the library: Newton-Schulz is the scalar polynomial
applied to the singular values of an SVD, and the moments are the printed recurrences,
one matrix at a time, with Algorithm 2's sums and its full m x n second moment.
Matrices are stored (fan_in, fan_out).
"""

import math

import numpy as np

KELLER = (3.4445, -4.7750, 2.0315)


def wide(x):
    """float64, or complex128 for complex input."""
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def relative_error(got, want):
    """||got - want||_F / ||want||_F; absolute where the reference is zero."""
    got, want = wide(got), wide(want)
    assert got.shape == want.shape, (got.shape, want.shape)
    size = np.linalg.norm(want)
    return float(np.linalg.norm(got - want) / (size if size > 0 else 1.0))


def scalar_newton_schulz(s, triples):
    """The map of one singular value (or an array of them)."""
    for a, b, c in triples:
        s = a * s + b * s**3 + c * s**5
    return s


def newton_schulz(x, triples, *, eps=0.0):
    """U p(s / (||s|| + eps)) V^H of every matrix of a stack (..., m, n)."""
    x = wide(x)
    out = np.zeros_like(x)
    for index in np.ndindex(x.shape[:-2]):
        size = np.abs(x[index]).max(initial=0.0)
        if size == 0:
            continue  # a zero matrix stays zero
        # Divided by its largest entry first, so that 1e-300 has an SVD as well.
        u, s, vh = np.linalg.svd(x[index] / size, full_matrices=False)
        s = s / (np.sqrt(np.sum(s**2)) + eps / size)
        out[index] = (u * scalar_newton_schulz(s, triples)) @ vh
    return out


def keller(x, steps=5, eps=0.0):
    return newton_schulz(x, [KELLER] * steps, eps=eps)


def assert_symmetric_product(got, x, addends, alpha, eps, tile=None):
    """alpha X X^T plus the sum of beta C, rounded once to a dtype of this ``eps``.

    And symmetric to the last bit: outside of the diagonal tiles if a ``tile`` is given.
    The others are copied across the diagonal, but a diagonal tile is one product of the
    platform's, and some CPUs add up (i, j) and (j, i) in different orders.
    """
    x, got = wide(x), wide(got)
    want = alpha * x @ x.swapaxes(1, 2)
    want = want + sum(beta * wide(c) for beta, c in addends)
    assert np.abs(got - want).max() <= eps * np.abs(want).max()
    across = got.swapaxes(1, 2)
    if tile is not None:
        row, column = np.indices(got.shape[1:]) // tile
        across = np.where(row == column, got, across)
    np.testing.assert_array_equal(got, across)


def in_pieces(x, down, right):
    """(L, m, n) as (down, right, L, m / down, n / right)."""
    stack, m, n = x.shape
    x = x.reshape(stack, down, m // down, right, n // right)
    return x.transpose(1, 3, 0, 2, 4)


def polar(x):
    """The exact polar factor U V^H of one matrix."""
    u, _, vh = np.linalg.svd(wide(x), full_matrices=False)
    return u @ vh


def momentum(grads, b1, *, nesterov=False):
    """Keller Jordan's moving average, one numerator per step."""
    m = np.zeros_like(wide(grads[0]))
    numerators = []
    for g in map(wide, grads):
        m = b1 * m + (1 - b1) * g
        numerators.append(b1 * m + (1 - b1) * g if nesterov else m)
    return numerators


def _bias_corrected(numerators, roots, b1, b2, nesterov):
    """Divides numerator t by the sum of its weights, and V by 1 - b2^t."""
    for i, (numerator, root) in enumerate(zip(numerators, roots)):
        t = i + 1
        weight_of_m = 1 - b1**t
        weight = b1 * weight_of_m + (1 - b1) if nesterov else weight_of_m
        yield numerator / weight, root / math.sqrt(1 - b2**t)


def _ratios(grads, roots, b1, b2, eps, nesterov, bias_correction):
    numerators = momentum(grads, b1, nesterov=nesterov)
    pairs = zip(numerators, roots)
    if bias_correction:
        pairs = _bias_corrected(numerators, roots, b1, b2, nesterov)
    updates = []
    for numerator, root in pairs:
        divisor = root + eps
        safe = np.where(divisor == 0, 1.0, divisor)
        updates.append(np.where(divisor == 0, 0.0, numerator / safe))
    return updates


def second_moment(
    grads, b1=0.95, b2=0.95, eps=1e-10, *, nesterov=False, bias_correction=False
):
    """M / (sqrt(V) + eps), lines 4 to 6 of Algorithm 1, one update per step."""
    v = np.zeros(np.shape(grads[0]))
    roots = []
    for g in map(wide, grads):
        v = b2 * v + (1 - b2) * np.abs(g) ** 2
        roots.append(np.sqrt(v))
    return _ratios(grads, roots, b1, b2, eps, nesterov, bias_correction)


def factored_second_moment(
    grads, b1=0.95, b2=0.95, eps=1e-10, *, nesterov=False, bias_correction=False
):
    """M / (sqrt(V-hat) + eps) of matrices (n, m), lines 4 to 9 of Algorithm 2."""
    n, m = np.shape(grads[0])
    r, c = np.zeros(n), np.zeros(m)
    roots = []
    for g in map(wide, grads):
        square = np.abs(g) ** 2
        r = b2 * r + (1 - b2) * square @ np.ones(m)
        c = b2 * c + (1 - b2) * square.T @ np.ones(n)
        v_hat = np.outer(r, c) / r.sum() if r.sum() > 0 else np.zeros((n, m))
        roots.append(np.sqrt(v_hat))
    return _ratios(grads, roots, b1, b2, eps, nesterov, bias_correction)


def soap(
    grads,
    b1=0.95,
    b2=0.95,
    eps=1e-8,
    *,
    shampoo_beta=0.95,
    frequency=10,
    nesterov=False,
):
    """SOAP's directions of one matrix (n, m), the first bases after ``frequency``."""
    n, m = np.shape(grads[0])
    sides = [np.zeros((n, n)), np.zeros((m, m))]  # L and R
    bases = [np.eye(n), np.eye(m)]
    v = np.zeros((n, m))
    directions = []
    numerators = momentum(grads, b1, nesterov=nesterov)
    for t, (g, numerator) in enumerate(zip(map(wide, grads), numerators), 1):
        p, q = bases
        v = b2 * v + (1 - b2) * np.abs(p.conj().T @ g @ q) ** 2
        rotated = p.conj().T @ numerator @ q
        directions.append(p @ (rotated / (np.sqrt(v) + eps)) @ q.conj().T)
        for k, gram in enumerate((g @ g.conj().T, g.conj().T @ g)):
            sides[k] = shampoo_beta * sides[k] + (1 - shampoo_beta) * gram
        if t == frequency:
            (rows, p), (columns, q) = (np.linalg.eigh(side) for side in sides)
            bases = [p[:, ::-1], q[:, ::-1]]
            shares = np.outer(rows[::-1] / rows.sum(), columns[::-1] / columns.sum())
            v = v.sum() * shares
        elif t % frequency == 0:
            for k, side in enumerate(sides):
                values = np.diag(bases[k].conj().T @ side @ bases[k]).real
                order = np.argsort(-values)
                shifted = side + 1e-6 * values.max() * np.eye(len(side))
                bases[k] = np.linalg.qr(shifted @ bases[k][:, order])[0]
                v = np.take(v, order, axis=k)
    return directions


def unit(x):
    """x / ||x||_F, and zero for zero."""
    size = np.linalg.norm(x)
    return x / size if size > 0 else x


def hyperball(w, directions, rates, radius=None):
    """W after each step ``W = R n(W - rate R n(u))``, of one matrix."""
    w = wide(w)
    radius = np.linalg.norm(w) if radius is None else radius
    path = []
    for u, rate in zip(directions, rates, strict=True):
        w = radius * unit(w - rate * radius * unit(wide(u)))
        path.append(w)
    return path


def cautious_decay(u, p, weight_decay):
    """u + weight_decay p where subtracting u shrinks p, entry by entry."""
    u, p = wide(u), wide(p)
    return np.where((np.conj(u) * p).real > 0, u + weight_decay * p, u)


def equalize_by_roots(m):
    """diag(M M^H)^(-1/4) M diag(M^H M)^(-1/4), with zero rows and columns kept."""
    m = wide(m)
    rows = np.diag(m @ m.conj().T).real
    columns = np.diag(m.conj().T @ m).real
    rows, columns = (np.where(x > 0, x, 1.0) ** -0.25 for x in (rows, columns))
    return np.diag(rows) @ m @ np.diag(columns)


def equalize_by_sweeps(m):
    """RMS 1, then twice each output and each input over its RMS within [1/4, 4]."""
    m = wide(m)
    m = m / (np.sqrt(np.mean(np.abs(m) ** 2)) or 1.0)
    for _ in range(2):
        for j in range(m.shape[1]):
            m[:, j] /= min(max(np.sqrt(np.mean(np.abs(m[:, j]) ** 2)), 0.25), 4.0)
        for i in range(m.shape[0]):
            m[i, :] /= min(max(np.sqrt(np.mean(np.abs(m[i, :]) ** 2)), 0.25), 4.0)
    return m


def ema_nesterov(x, step_from, betas, decay):
    """Iterates x and the points x + beta m: x+ = A(x + beta m), A given by its step.

    ``step_from(t, point)`` is A(point) - point; ``betas`` has one more entry than there
    are steps, the last for the point after them.
    """
    x, m = wide(x), np.zeros_like(wide(x))
    iterates, points = [x], [x + betas[0] * m]
    for t, beta in enumerate(betas[1:]):
        new = points[-1] + step_from(t, points[-1])
        m = decay * m + (1 - decay) * (new - x)
        x = new
        iterates.append(x)
        points.append(x + beta * m)
    return iterates, points


def spectral(fan_in, fan_out):
    return math.sqrt(fan_out / fan_in)


def muon(grads, learning_rate, b1=0.95, *, steps=5, nesterov=True, eps=0.0):
    """Keller Jordan's Muon without weight decay: the updates of one matrix."""
    n, m = np.shape(grads[0])
    factor = math.sqrt(max(1.0, m / n))
    return [
        -learning_rate * factor * keller(x, steps, eps)
        for x in momentum(grads, b1, nesterov=nesterov)
    ]


def muon2(grads, learning_rate, b1=0.95, b2=0.95, eps=1e-10, *, steps=3, **options):
    """Algorithm 1: the updates of one matrix."""
    n, m = np.shape(grads[0])
    return [
        -learning_rate * spectral(n, m) * keller(x, steps)
        for x in second_moment(grads, b1, b2, eps, **options)
    ]


def muon2_f(grads, learning_rate, b1=0.95, b2=0.95, eps=1e-10, *, steps=3, **options):
    """Algorithm 2: the updates of one matrix."""
    n, m = np.shape(grads[0])
    return [
        -learning_rate * spectral(n, m) * keller(x, steps)
        for x in factored_second_moment(grads, b1, b2, eps, **options)
    ]
