from __future__ import annotations

import lightning.pytorch  # noqa: F401  # sets environment variables at its import: not within a test
import pytest

from tests.conf import tiny


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that train on a tiny corpus."""
    return tiny.write_corpus(tmp_path_factory.mktemp("corpus"))
