"""The paper's experiment in small: one decoder, trained from scratch under every regime and control.

`run.run_study(config.StudyConfig(), out)` is what `aah study` calls; `results` has the table and what it shows.
"""
