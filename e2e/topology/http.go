// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"context"
	"io"
	"net"
	"net/http"
	"time"
)

// HTTPGet gets a URL from the host and returns the status code and the text of the response.
func (h *Host) HTTPGet(ctx context.Context, url string) (status int, text string, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return 0, "", err
	}
	dial := func(ctx context.Context, network, address string) (c net.Conn, err error) {
		err = h.Do(func() error {
			c, err = new(net.Dialer).DialContext(ctx, network, address)
			return err
		})
		return c, err
	}
	client := http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}
	response, err := client.Do(request)
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(response.Body)
	return response.StatusCode, string(body), err
}
