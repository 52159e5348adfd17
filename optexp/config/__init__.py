"""From a command line to a checked, typed experiment."""

from __future__ import annotations

from optexp.config.experiment import Environment as Environment
from optexp.config.experiment import Experiment as Experiment
from optexp.config.experiment import Settings as Settings
from optexp.config.experiment import Tracking as Tracking
from optexp.config.experiment import read_settings as read_settings
from optexp.config.experiment import resolve as resolve
from optexp.errors import ConfigError as ConfigError
from optexp.schema import build as build
from optexp.schema import choice as choice
from optexp.schema import suggest as suggest

one_of = choice  # its name before
