// SPDX-License-Identifier: Apache-2.0

package conflist

import "context"

// Sweep removes what killed processes of ours left in a configuration directory.
// One that does not exist is an fs.ErrNotExist.
func Sweep(dir string) error {
	f, err := openFolder(context.Background(), dir)
	if err != nil {
		return err
	}
	return f.Close()
}
