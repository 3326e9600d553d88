"""The line that tells what loading an engine came to."""

from dsc.runtime.load_text import load_text


def test_bytes_and_rate_are_told_where_weights_were_copied():
    loaded = {"gb": 26.345, "gb_per_s": 3.254, "load_seconds": 8.096}
    assert load_text(loaded, 4038272) == "loaded 26.3 GB in 8.1 s, 3.25 GB/s; the cache holds 4,038,272 tokens"
    assert load_text({}, 256) == "the cache holds 256 tokens"
