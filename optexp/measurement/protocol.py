"""A name in configurations outside of the repository; the code is `optexp.measurement.settings`."""

from __future__ import annotations

from optexp.measurement.settings import MeasurementSettings

Protocol = MeasurementSettings
