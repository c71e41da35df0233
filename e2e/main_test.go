// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"flag"
	"fmt"
	"os"
	"runtime"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/sandbox"
)

// TestMain runs at least six parallel tests at once, as most of them wait most of the time.
// A test is not parallel if it measures time or memory, changes files that all nodes share
// (/etc/networks), or runs CNI verbs in this process: a child process holds the locks of its
// parent between fork and exec.
func TestMain(m *testing.M) {
	if err := flag.Set("test.parallel", fmt.Sprint(max(6, runtime.GOMAXPROCS(0)))); err != nil {
		panic(err)
	}
	os.Exit(sandbox.Run(m))
}
