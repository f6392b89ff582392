"""Every leaf of every tree goes where it belongs, or a warning says that it may not."""

import pytest
import real_trees


@pytest.fixture(params=real_trees.NAMES)
def project(request):
    return real_trees.read(request.param)


def test_no_leaf_is_silently_wrong(project):
    wrong = [o for o in real_trees.outcomes(project) if o.silently_wrong]
    assert not wrong, "\n".join(
        f"{o.path} {o.shape}, {o.what}: want {o.expected}, got {o.got}" for o in wrong
    )
