// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/sandbox"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
)

// TestFailedReadings: without a file descriptor for a socket nothing is known of the kernel, which is no reason
// to choose another backend.
func TestFailedReadings(t *testing.T) {
	sandbox.WithoutFiles(t)
	d := New()
	_, errFind := d.FindChain(t.Context(), "X")
	_, errOwned := d.Owned(t.Context())
	_, errProbe := d.Probe(t.Context(), "")
	_, errKubeProxy := d.HasKubeProxy()
	for name, err := range map[string]error{
		"find": errFind, "owned": errOwned, "probe": errProbe, "kube-proxy": errKubeProxy,
	} {
		isFailed := errors.Is(err, netfilter.ErrBusy) && !errors.Is(err, netfilter.ErrUnusable)
		if !isFailed || !errors.Is(err, unix.EMFILE) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestRefusedReadings: what the kernel lacks or forbids makes the backend unusable.
func TestRefusedReadings(t *testing.T) {
	for _, number := range []unix.Errno{unix.EPERM, unix.EPROTONOSUPPORT, unix.EOPNOTSUPP, unix.EINVAL} {
		err := readError(number)
		if !errors.Is(err, netfilter.ErrUnusable) || errors.Is(err, netfilter.ErrBusy) {
			t.Errorf("%d: %v", number, err)
		}
	}
}
