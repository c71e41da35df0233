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

// TestMain runs parallel tests six at once on a small machine too, unless -parallel
// says how many: most of them wait most of the time. A test is not parallel where it
// measures time, writes what all nodes share (/etc, /var/lib and /run/containerd), or
// runs verbs within this process: a process that is just being started has its locks.
func TestMain(m *testing.M) {
	if err := flag.Set("test.parallel", fmt.Sprint(max(6, runtime.GOMAXPROCS(0)))); err != nil {
		panic(err)
	}
	os.Exit(sandbox.Run(m))
}
