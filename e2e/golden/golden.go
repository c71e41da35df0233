// SPDX-License-Identifier: Apache-2.0

// Package golden compares what tests get with files in testdata. With the flag -update, tests write the
// files.
package golden

import (
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the golden files") //nolint:gochecknoglobals // a flag

// Updating reports whether the flag -update is given.
func Updating() bool { return *update }

// Check fails the test if the text is not that of the file.
func Check[T string | []byte](t *testing.T, file string, got T) {
	t.Helper()
	if *update {
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("%s (-want +got; -update writes it):\n%s", file, diff)
	}
}
