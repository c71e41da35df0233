// SPDX-License-Identifier: Apache-2.0

package diagnose

import "github.com/ip-masq/ip-masq-cni/pkg/safefile"

// readFile reads a regular file of a bounded size.
func readFile(path string) ([]byte, error) {
	const most = 4 << 20
	data, _, err := safefile.ReadFile(path, most)
	return data, err
}
