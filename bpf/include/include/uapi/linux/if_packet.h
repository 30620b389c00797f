/* Included by bcc; nothing in it is used. */
