// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

// TestManyExemptPrefixes counts third-party rules beside 10,000 exempt prefixes, which each scrape of the
// metrics does: Docker's rule for its network, and 4,000 for its ports.
func TestManyExemptPrefixes(t *testing.T) {
	const most = 500 * time.Millisecond
	isolate(t)
	feed(t, "ip link add eth0 type bridge\nip link set eth0 up\nip address add 192.0.2.10/24 dev eth0\nip route add default via 192.0.2.1\n", "sh", "-e")
	lines := []string{"*nat", "-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE"}
	for i := range 4000 {
		container := fmt.Sprintf("172.17.%d.%d/32", i/256, i%256)
		lines = append(lines, "-A POSTROUTING -s "+container+" -d "+container+" -p tcp -m tcp --dport 80 -j MASQUERADE")
	}
	feed(t, strings.Join(append(lines, "COMMIT\n"), "\n"), "iptables-nft-restore", "--noflush")
	h := newHost(t)
	var exempt []netip.Prefix
	for i := range 10_000 {
		exempt = append(exempt, netip.MustParsePrefix(fmt.Sprintf("10.%d.%d.0/25", i/256, i%256)))
	}
	h.policies[0].NonMasqueradeCIDRs = exempt
	n := h.node()
	var before, after unix.Rusage
	assert.NoError(t, unix.Getrusage(unix.RUSAGE_THREAD, &before))
	count := assert.Must(CountThirdParty(n))(t)
	assert.NoError(t, unix.Getrusage(unix.RUSAGE_THREAD, &after))
	took := time.Duration(after.Utime.Nano() + after.Stime.Nano() - before.Utime.Nano() - before.Stime.Nano())
	assert.Equal(t, "rules", count, 0)
	t.Logf("%v", took)
	if took > most {
		t.Errorf("took %v of a processor, want at most %v", took, most)
	}
}
