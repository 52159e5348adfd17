"""`Protocol`, a name that configurations outside this repository use; the code is `optexp.measurement.settings`."""

from __future__ import annotations

from optexp.measurement.settings import MeasurementSettings

Protocol = MeasurementSettings
