// SPDX-License-Identifier: Apache-2.0

package topology

// T is the part of testing.TB, and of rapid.T, that is used here. It keeps the
// package testing out of the demo.
type T interface {
	Helper()
	Fatalf(format string, args ...any)
	Cleanup(func())
}

// New builds a topology for a test, closes it at its end, and fails the test if
// either goes wrong.
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

// Must takes what a function of this package returns, and fails the test on an
// error:
//
//	pod := topology.Must(world.AddPod("a", address))(t)
func Must[V any](value V, err error) func(T) V {
	return func(t T) V {
		t.Helper()
		if err != nil {
			t.Fatalf("%v", err)
		}
		return value
	}
}
