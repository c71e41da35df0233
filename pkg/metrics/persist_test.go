// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestRetryPauses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		last := time.Now()
		var pauses []int
		retry(ctx, func() bool {
			pauses = append(pauses, int(time.Since(last).Seconds()))
			last = time.Now()
			if len(pauses) == 11 {
				cancel()
			}
			return len(pauses) == 8
		})
		if diff := cmp.Diff([]int{0, 1, 2, 4, 8, 16, 30, 30, 1, 2, 4}, pauses); diff != "" {
			t.Error(diff)
		}
	})
}
