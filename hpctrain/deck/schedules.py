"""The names of pipeline schedules."""

ONE_CHUNK = ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2")
"""Schedules with one part of the model on each stage."""

V_SHAPED = ("zb-v", "v-half", "v-min", "dualpipe-v")
"""Schedules with two parts on each stage, in a V: forward order down the stages, then up again."""

TWO_CHUNKS = ("interleaved", *V_SHAPED)
"""Schedules with two or more parts on each stage."""

SCHEDULE_NAMES = (*ONE_CHUNK, *TWO_CHUNKS)
"""Names of all built-in schedules; users can give others as files."""
