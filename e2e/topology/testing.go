// SPDX-License-Identifier: Apache-2.0

package topology

// T is the part of testing.TB and rapid.T that this package uses, so that the demo does not import
// package testing.
type T interface {
	Helper()
	Fatalf(format string, args ...any)
	Cleanup(func())
}

// New builds a topology for a test and closes it at the test's end. It fails the test on an error.
func New(t T, options Options) *Topology {
	t.Helper()
	built := Must(Build(options))(t)
	t.Cleanup(func() {
		if err := built.Close(); err != nil {
			t.Fatalf("close topology: %v", err)
		}
	})
	return built
}

// NoError fails the test on an error.
func NoError(t T, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%v", err)
	}
}

// Must returns the value of a function of this package and fails the test on an error:
//
//	pod := topology.Must(world.AddPod("a", address))(t)
func Must[V any](value V, err error) func(T) V {
	return func(t T) V {
		t.Helper()
		NoError(t, err)
		return value
	}
}
