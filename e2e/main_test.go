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

// TestMain runs at least six parallel tests at once unless -parallel is given, because most tests
// wait most of the time. A test does not run in parallel if it measures time, writes a directory
// that all nodes share (/etc, /var/lib, /run/containerd), or runs verbs within the test process
// without time to wait for the lock, whose file descriptor a fork inherits.
func TestMain(m *testing.M) {
	if err := flag.Set("test.parallel", fmt.Sprint(max(6, runtime.GOMAXPROCS(0)))); err != nil {
		panic(err)
	}
	os.Exit(sandbox.Run(m))
}
