// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// remedied adds what to do about an error of a file system.
func remedied(err error) error {
	for _, known := range []struct {
		cause  error
		remedy string
	}{
		{unix.EROFS, "let this program write there: in a container, mount it writable; in a unit of systemd, add it to ReadWritePaths"},
		{unix.EBUSY, "a file that is mounted by itself cannot be replaced: mount the directory that it is in"},
		{unix.ENOSPC, "make room there"},
	} {
		if errors.Is(err, known.cause) {
			return fmt.Errorf("%w; %s", err, known.remedy)
		}
	}
	return err
}
