// SPDX-License-Identifier: Apache-2.0

package cniplugin

import (
	"errors"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// Codes of our own. The CNI spec leaves those from 100 on to plugins.
const (
	codeRules uint = 100 // the rules cannot be made sure of
	codeDrift uint = 101 // CHECK found a difference
)

// coded is an error whose CNI code is decided where it arises.
type coded struct {
	code uint
	error
}

func (c coded) Unwrap() error { return c.error }

func withCode(code uint, err error) error {
	if err == nil {
		return nil
	}
	return coded{code, err}
}

// cniError turns an error into the form in which the runtime gets it: the one
// place where that happens.
func cniError(err error) error {
	if err == nil {
		return nil
	}
	return types.NewError(codeOf(err), err.Error(), "")
}

func codeOf(err error) uint {
	var decided coded
	var conflict *policy.ConflictError
	var bound *policy.BoundError
	switch {
	case errors.As(err, &decided):
		return decided.code
	case errors.As(err, &conflict), errors.As(err, &bound), errors.Is(err, enforce.ErrOtherDataDir):
		return types.ErrInvalidNetworkConfig
	case errors.Is(err, store.ErrBusy):
		return types.ErrTryAgainLater
	default:
		return codeRules
	}
}
