// SPDX-License-Identifier: Apache-2.0

// Package golden compares what tests get with files in testdata. With the flag -update, tests write the
// files.
package golden

import (
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

var update = flag.Bool("update", false, "write the golden files") //nolint:gochecknoglobals // a flag

// Updating reports whether the flag -update is given.
func Updating() bool { return *update }

// Check fails the test if the text is not that of the file.
func Check[T string | []byte](t *testing.T, file string, got T) {
	t.Helper()
	if *update {
		assert.NoError(t, os.MkdirAll(filepath.Dir(file), 0o755))
		assert.NoError(t, os.WriteFile(file, []byte(got), 0o644))
	}
	assert.Equal(t, file+", which -update writes", string(got), string(assert.Must(os.ReadFile(file))(t)))
}
