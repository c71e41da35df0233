// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// KernelBefore reports whether the kernel is older than version major.minor, for tests of what
// kernels can do since then.
func KernelBefore(major, minor int) bool {
	var u unix.Utsname
	var x, y int
	if err := unix.Uname(&u); err != nil {
		return false
	}
	_, err := fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &x, &y)
	return err == nil && (x < major || x == major && y < minor)
}
