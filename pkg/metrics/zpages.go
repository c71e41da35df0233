// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"fmt"
	"io"
	"maps"
	"net/http"
	"runtime"
	"slices"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// zHeader begins each z-page.
const zHeader = "\nip-masq-reconciler"

// zPage answers as the z-pages of Kubernetes components do: a header and plain text.
func zPage(name string, page func(io.Writer)) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		fmt.Fprintf(w, "%s %s\nWarning: This endpoint is not meant to be machine parseable, "+
			"has no formatting compatibility guarantees and is for debugging purposes only.\n\n", zHeader, name)
		page(w)
	}
}

func (m *Monitor) statusz(w io.Writer) {
	up := int(time.Since(m.started).Seconds())
	const minute, hour = 60, 60 * 60
	fmt.Fprintf(w, "Started: %s\nUp: %d hr %02d min %02d sec\nGo version: %s\nBinary version: %s\nPaths: %s\n",
		m.started.UTC().Format(time.UnixDate), up/hour, up%hour/minute, up%minute, runtime.Version(), m.options.Version,
		"/flagz /healthz /livez /readyz /statusz")
}

func (m *Monitor) flagz(w io.Writer) {
	m.mu.Lock()
	flags := m.settings.Flags // not changed any more
	m.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(flags)) {
		fmt.Fprintf(w, "%s=%s\n", name, policy.Printable(flags[name]))
	}
}
