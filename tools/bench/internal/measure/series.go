// SPDX-License-Identifier: Apache-2.0

package measure

import (
	"fmt"
	"math"
	"math/rand/v2"
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

// String writes the median and, in brackets, the quartiles.
func (s Series) String() string {
	if len(s) == 0 {
		return "–"
	}
	return fmt.Sprintf("%s [%s–%s]", Short(s.Median()), Short(s.Quantile(0.25)), Short(s.Quantile(0.75)))
}

// Estimate is a median with its 95 % confidence interval by bootstrap. With fewer than 6 figures
// the interval is from the minimum to the maximum.
type Estimate struct {
	Median, Low, High float64
	N                 int
}

// estimate resamples with a fixed seed, so that the same figures give the same interval.
func estimate(s Series) Estimate {
	const resamples, few = 1000, 6
	if len(s) < few {
		return Estimate{Median: s.Median(), Low: s.Quantile(0), High: s.Quantile(1), N: len(s)}
	}
	random := rand.New(rand.NewPCG(1, 2))
	medians := make(Series, resamples)
	sample := make(Series, len(s))
	for i := range medians {
		for j := range sample {
			sample[j] = s[random.IntN(len(s))]
		}
		medians[i] = sample.Median()
	}
	return Estimate{Median: s.Median(), Low: medians.Quantile(0.025), High: medians.Quantile(0.975), N: len(s)}
}

// EstimateOf returns the estimate of figures that are not ratios.
func EstimateOf(s Series) Estimate { return estimate(s) }

// String writes "1.21 [1.19–1.24]".
func (e Estimate) String() string {
	if e.N == 0 {
		return "–"
	}
	return fmt.Sprintf("%s [%s–%s]", Short(e.Median), Short(e.Low), Short(e.High))
}

// Short writes a number with three significant digits, and large ones in full.
func Short(v float64) string {
	switch a := math.Abs(v); {
	case math.IsNaN(v):
		return "–"
	case a == 0:
		return "0"
	case a >= 99.95:
		return fmt.Sprintf("%.0f", v)
	case a >= 9.995:
		return fmt.Sprintf("%.1f", v)
	case a >= 0.1:
		return fmt.Sprintf("%.2f", v)
	default:
		return fmt.Sprintf("%.3f", v)
	}
}
