"""The names of pipeline schedules."""

ONE_CHUNK = ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2")
"""Of one part of the model on each stage."""

V_SHAPED = ("zb-v", "v-half", "v-min", "dualpipe-v")
"""Of two, down the stages and up again."""

TWO_CHUNKS = ("interleaved", *V_SHAPED)
"""Of two, or more."""

NAMES = (*ONE_CHUNK, *TWO_CHUNKS)
"""All; other schedules are in files."""
