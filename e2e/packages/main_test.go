// SPDX-License-Identifier: Apache-2.0

//go:build e2e_packages

package packages

import (
	"os"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/sandbox"
)

func TestMain(m *testing.M) { os.Exit(sandbox.Run(m)) }
