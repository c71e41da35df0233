// SPDX-License-Identifier: Apache-2.0

package measure

import (
	"math"
	"slices"
)

// Series are figures of one kind.
type Series []float64

// Quantile returns the value below which a share q of the figures lies, by
// linear interpolation; NaN if there are none.
func (s Series) Quantile(q float64) float64 {
	if len(s) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(s))
	at := q * float64(len(sorted)-1)
	low := int(at)
	high := min(low+1, len(sorted)-1)
	return sorted[low] + (at-float64(low))*(sorted[high]-sorted[low])
}

// Median is the quantile 0.5.
func (s Series) Median() float64 { return s.Quantile(0.5) }
