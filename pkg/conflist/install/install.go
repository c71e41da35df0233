// SPDX-License-Identifier: Apache-2.0

package install

import (
	"context"
	"errors"

	"github.com/ip-masq/ip-masq-cni/pkg/conflist"
)

// ErrStopped says that the context ended before all was done.
var ErrStopped = errors.New("stopped before all was done; run it again")

// Install is what is to be brought to a node.
type Install struct {
	Dirs Dirs
	// Plugin is the file that is copied.
	Plugin string
	// Place has our entry, in the conflists of Dirs.Conf; nil leaves them alone.
	Place *conflist.Place
}

// Installed is what stands on the node after an Install.
type Installed struct {
	Binary   Binary
	Conflist conflist.Change
}

// Run puts the plugin where the runtime runs it, and then our entry into the
// conflist. Once more is fine. The error is a BinaryError where there is no plugin
// that works, and otherwise about the conflist, while the plugin is in place.
func (i Install) Run(ctx context.Context) (Installed, error) {
	var done Installed
	var err error
	if done.Binary, err = Put(ctx, i.Plugin, i.Dirs.Bin); err != nil {
		return done, &BinaryError{err}
	}
	if i.Place == nil {
		return done, nil
	}
	place := *i.Place
	place.Dir = i.Dirs.Conf
	if done.Conflist, err = place.Ensure(ctx); err != nil && ctx.Err() != nil {
		err = ErrStopped
	}
	return done, err
}

// BinaryError is why the plugin could not be put in place. No conflist was
// touched.
type BinaryError struct{ err error }

// Error implements error.
func (e *BinaryError) Error() string { return e.err.Error() }

// Unwrap returns the cause.
func (e *BinaryError) Unwrap() error { return e.err }
