"""What an s3:// URL names."""

from __future__ import annotations

import pytest
from neffcache_server.problems import SetupError
from neffcache_server.storage.s3_client import parse_s3_url


@pytest.mark.parametrize(
    ("url", "bucket", "prefix"),
    [
        ("s3://b", "b", ""),
        ("s3://b/", "b", ""),
        ("s3://b/p", "b", "p/"),
        ("s3://b/p/", "b", "p/"),
        ("s3://my.bucket-1/a/b", "my.bucket-1", "a/b/"),
    ],
)
def test_bucket_and_prefix(url: str, bucket: str, prefix: str) -> None:
    assert parse_s3_url(url) == (bucket, prefix)


@pytest.mark.parametrize(
    "url", ["s3://", "s3:///p", "s3://key:secret@b/p", "s3://b/p?x=1", "s3://b/a//b", "s3://b#x"]
)
def test_anything_else_is_refused(url: str) -> None:
    with pytest.raises(SetupError):
        parse_s3_url(url)
